"""Copies rows in three ways: to rows of another length; rows of valid tokens side by side; and back to their tokens'
places.

    to another length     missing columns become 0, surplus columns are dropped
    of the valid tokens   in their order, with zeros after them; gather_tokens.py does this where there is a target
    back                  in place, from the last row to the first, because no row moves to a lower place:

                 valid tokens first         where the tokens are
    place        0 1 2 3 - -       ->       0 - 1 - 2 3

gather_tokens.py has a kernel of its own. Its programs walk one row each, because they also compute the row's dot
product with the target's row. A copy needs no sum, so here a program copies a block of rows and columns, and each
thread has four loads of 16 bytes for any D.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ...support.integers import cdiv
from ..gemm.device import interpreted
from ..gemm.tma import load_tile, matrix_of, store_tile
from ..kernel import Kernel
from .valid_tokens import ValidTokens, padded_rows, valid_rows

# N tokens, n rows, C columns

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


@Kernel
def spread_rows_kernel(
    matrix,  # (N, D)
    place_ptr,  # (N,)
    count_ptr,  # ()
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program owns a few columns. It reads a block of rows, then writes it. The rows it reads afterwards stand
    before the block, so no barrier has to wait for the writes. If all tokens are valid there is nothing to do.
    """
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.where(tl.load(count_ptr) < N, tl.cdiv(N, BLOCK_N), 0)
    for block in range(0, blocks):
        rows = (blocks - 1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.load(place_ptr + rows, mask=rows < N, other=-1)
        values = load_tile(matrix, place, cols, place >= 0, cols < D)
        tl.debug_barrier()  # the whole block is read before any of it is written
        store_tile(matrix, values, rows, cols, rows < N, cols < D)


def launch_spread_rows(matrix: Tensor, valid_tokens: ValidTokens, place: Tensor) -> None:
    """Moves row k to the place of the k-th valid token. Rows of ignored tokens become zeros."""
    tokens, columns = matrix.shape
    # A program has 32 columns, 64 bytes of 16-bit numbers, so there are 128 programs at D = 4096. With fewer columns
    # per program the kernel takes 1.5 times as long. With fewer rows at a time it waits for memory more often: 23 us at
    # 8192x1024 with 1024 rows, 33 us with 256 (H200).
    block_d = 64 if interpreted(matrix) else 32
    spread_rows_kernel[(cdiv(columns, block_d),)](
        matrix_of(matrix), place, valid_tokens.total, tokens, columns, BLOCK_N=1024, BLOCK_D=block_d, num_warps=8
    )
