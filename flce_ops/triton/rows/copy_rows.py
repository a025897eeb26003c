"""Copies rows in two ways: to rows of another length, and rows of valid tokens side by side.

    to another length     missing columns become 0, surplus columns are dropped
    of the valid tokens   in their order, with zeros after them; gather_tokens.py does this where there is a target

gather_tokens.py has a kernel of its own. Its programs walk one row each, because they also compute the row's dot
product with the target's row. A copy needs no sum, so here a program copies a block of rows and columns, and each
thread has four loads of 16 bytes for any D.

If D is no multiple of 16, a step runs on copies whose features are padded with zeros (with_padded_features). A tensor
map needs rows of a multiple of 16 bytes. Triton stores a tile in whole vectors only if it knows that 16 divides the
stride. The padded copies of input, linear_weight and their gradients are made only if they fit three quarters of the
workspace.

GPU time of a step of 8192 tokens and 32000 classes on an H200: at D = 2052, read by pointers, 37 ms; at D = 2056 7.1
ms, of which grad_input takes 3.1; at D = 2064 5.6 ms, of which grad_input takes 1.8. The four padded copies at D = 2052
take 0.19 ms.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...math.options import KlDivOptions
from ...math.statistics import shard_rows
from ...meta.arguments import Forward
from ...support.sizes import cdiv
from ...support.workspace import get_workspace, reserved
from ..gemm.tiles import load_tile, matrix_of, on_tma_device, store_tile
from ..kernel import Kernel
from .valid_tokens import ValidTokens, padded_rows, valid_rows

# N tokens, n rows, C columns, D hidden, V vocabulary

INTEGERS = (torch.int64, torch.int32, torch.int16)


@Kernel
def copy_rows_kernel(
    matrix,  # (N, C)
    out,  # (n, out_columns)
    # ValidTokens: their rows are copied, with zeros behind them up to a multiple of 128; None: all rows are copied
    valid_tokens,
    n,
    C,
    out_columns,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    count, end, sources = n, n, rows
    if valid_tokens is not None:
        count = valid_rows(valid_tokens, n)
        end = padded_rows(count, n)
        sources = tl.load(valid_tokens.order + rows, mask=rows < count, other=0).to(tl.int64)
    values = load_tile(matrix, sources, cols, rows < count, cols < C)
    store_tile(out, values, rows, cols, rows < end, cols < out_columns)


def launch_copy_rows(
    matrix: Tensor,  # (N, C)
    out: Tensor,  # (n, out_columns)
    valid_tokens: ValidTokens | None = None,
) -> None:
    (n, width), block_n, block_c = out.shape, 8, 512
    copy_rows_kernel[(cdiv(n, block_n), cdiv(width, block_c))](
        matrix_of(matrix),
        matrix_of(out),
        valid_tokens,
        n,
        matrix.shape[1],
        width,
        BLOCK_N=block_n,
        BLOCK_C=block_c,
    )


def copied_rows(matrices: Sequence[Tensor], columns: int) -> list[Tensor]:
    """The first `columns` columns of each matrix, padded with zeros: (N, columns), contiguous.

    Entries are copied as integers of 8, 4 or 2 bytes: the widest whose size divides the rows of both matrices. Rows
    that do not start on 16 bytes cannot be read in wider units, and ATen copies them number by number.
    """
    outs = [matrix.new_empty(matrix.shape[0], columns) for matrix in matrices]
    for matrix, out in zip(matrices, outs):
        if out.numel():
            integer = next(integer for integer in INTEGERS if fits(matrix, integer) and fits(out, integer))
            with torch.cuda.device_of(out):
                launch_copy_rows(matrix.view(integer), out.view(integer))
    return outs


def fits(matrix: Tensor, integer: torch.dtype) -> bool:
    """Whether the rows can be read as integers of this dtype. They always can if the integers have the size of the
    matrix's entries.
    """
    size, own = integer.itemsize, matrix.element_size()
    whole = all(number * own % size == 0 for number in (matrix.shape[1], matrix.stride(0)))
    return size == own or (matrix.stride(1) == 1 and whole and matrix.data_ptr() % size == 0)


ALIGNED = 16


def with_padded_features(launch: Callable[[Any], tuple[Tensor, ...]]) -> Callable[[Any], tuple[Tensor, ...]]:
    """Wraps a launcher so that it runs on padded copies, and cuts its results back to D columns. All two-dimensional
    results of the launcher that have the input's dtype must be (N, D) or (V, D).
    """

    @functools.wraps(launch)
    def run(call: Any) -> tuple[Tensor, ...]:
        input, linear_weight = call.operands[:2]
        hidden, size = input.shape[1], input.element_size()
        missing = -hidden % ALIGNED
        copies = 2 * (input.shape[0] + classes_of_largest_shard(call)) * (hidden + missing) * size
        if not missing or copies > 3 * get_workspace() // 4 or not on_tma_device(input):
            return launch(call)
        input, linear_weight = copied_rows((input, linear_weight), hidden + missing)
        call.operands = call.operands._replace(input=input, linear_weight=linear_weight)
        call.notes += (f"{missing} features of zeros added",)
        if isinstance(call, Forward):
            call.main_grad = None  # main_grad has the unpadded number of features, and only backward writes it
        with reserved(copies):
            results = launch(call)
        is_matrix = [result.dim() == 2 and result.dtype == input.dtype for result in results]
        matrices = iter(copied_rows([result for result, matrix in zip(results, is_matrix) if matrix], hidden))
        return tuple(next(matrices) if matrix else result for result, matrix in zip(results, is_matrix))

    return run


def classes_of_largest_shard(call: Any) -> int:
    """The rows of the largest rank's linear_weight. Ranks that share a vocabulary exchange numbers once a chunk, so the
    copies must take the same bytes of the workspace on all of them: otherwise they would have different chunks.
    """
    options = vars(call).get("options")
    shared = options if isinstance(options, KlDivOptions) else call
    ranks = getattr(shared, "ranks", 1)
    return call.operands.linear_weight.shape[0] if ranks == 1 else shard_rows(shared.vocab_size, ranks)
