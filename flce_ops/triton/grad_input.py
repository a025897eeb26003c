"""grad_input of a chunk of tokens: E @ linear_weight in float32, a block at a time, each rounded once.

    product = E[rows] @ linear_weight[:, columns]                        cuBLAS, (r, c) float32
    grad_input[rows, columns] = row factors product + residuals          finish_product.py

A block reads r rows of E and c columns of linear_weight over the whole vocabulary, all blocks of n tokens together
n D V (1 / c + 1 / r) numbers: so they are near squares, as large as there is memory for. In the workspace that is the
small part, 1024 x 2048 numbers, and what the chunks leave (chunks.py). The rows of grad_input of later chunks hold
nothing yet, so they are memory too: with them all of a chunk is mostly one block. H200, of the time of three GEMMs:
1.023 -> 1.008 at 16384x4096x128256.
"""

import torch
import triton
from torch import Tensor

from flce_ops.support.readable import readable_rows
from flce_ops.triton.chunks import MULTIPLE, slices
from flce_ops.triton.finish_product import launch_finish_product
from flce_ops.triton.gemm import accumulate

# n tokens of a chunk, D hidden, V vocabulary

COLUMN_PIECES_AT_MOST = 8


def product_blocks(rows: int, hidden: int, numbers: int) -> list[tuple[slice, slice]]:
    """Blocks of an (n, D) product that read the least, of at most `numbers`; where none fits, of 128 rows."""
    cuts = []
    for pieces in range(1, COLUMN_PIECES_AT_MOST + 1):
        columns = slices(hidden, triton.cdiv(hidden, pieces))
        blocks = slices(rows, max(numbers // columns[0].stop // MULTIPLE * MULTIPLE, MULTIPLE))
        excess = max(blocks[0].stop * columns[0].stop - numbers, 0)
        cuts.append((excess, len(blocks) * hidden + len(columns) * rows, blocks, columns))
    _, _, blocks, columns = min(cuts, key=lambda cut: cut[:2])
    return [(block, features) for block in blocks for features in columns]


def float32_memory(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat float32, from the first multiple of 16 bytes to the last.

    Empty where there is none.
    """
    numbers = tensor.view(-1)
    first = -numbers.storage_offset() % 8
    count = (numbers.shape[0] - first) // 8 * 8
    if count <= 0:
        return numbers.new_empty(0, dtype=torch.float32)
    return numbers[first : first + count].view(torch.float32)


def write_grad_input(
    out: Tensor,  # (n, D) rows of grad_input
    pieces: list[tuple[slice, Tensor]],  # columns v of the vocabulary, (n, v) of E
    linear_weight: Tensor,  # (V, D)
    column: Tensor,  # (n,) the target's, -1 where there is none
    row_factor: Tensor,  # (n,)
    residual: Tensor,  # (n,)
    *,
    nbytes: int,  # of workspace for a block of the product
    memory: Tensor,  # flat float32; a block that fits there takes nothing of the workspace
    copies: int,  # bytes for slices of a linear_weight that BLAS cannot read where it lies
    outer: tuple[Tensor, Tensor] | None = None,  # (n,), (D,): their outer product is added
) -> None:
    numbers = max(nbytes // 4, memory.shape[0])
    for block, features in product_blocks(out.shape[0], out.shape[1], numbers):
        shape = (block.stop - block.start, features.stop - features.start)
        if shape[0] * shape[1] <= memory.shape[0]:
            product = memory[: shape[0] * shape[1]].view(shape)
        else:
            product = torch.empty(shape, dtype=torch.float32, device=out.device)
        for cols, piece in pieces:
            for part, weight in readable_rows(linear_weight[cols, features], copies):
                first = cols.start == part.start == 0
                accumulate(product, piece[block, part], weight, first=first)
            del weight  # a copy, perhaps: before the next piece's is allocated
        launch_finish_product(
            product,
            out[block, features],
            linear_weight[:, features],
            column[block],
            row_factor[block],
            residual[block],
            None if outer is None else (outer[0][block], outer[1][features]),
        )
        del product  # before the next one is allocated
