"""Rows copied: to rows of another length, of the valid tokens side by side, and back to where the tokens stand.

    to another length     what is missing at their end becomes 0, what is too much stays behind
    of the valid tokens   in their order, zeros behind them: gather_tokens.py where there is no target
    back                  in place, from the last row to the first, as no row moves down:

                 valid tokens first         as the tokens stand
    place        0 1 2 3 - -       ->       0 - 1 - 2 3

A kernel of its own beside gather_tokens.py: there a program walks one row, whose product with the target's it adds up;
a copy has nothing to add up, and blocks of rows and columns make four loads of 16 bytes a thread whatever D is.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.device import interpreted
from ..gemm.tma import load_tile, matrix_of, store_tile
from ..launch.replay import Kernel, repeated
from .valid_tokens import ValidTokens, padded_rows, valid_rows

# N tokens, n rows, C columns

INTEGERS = (torch.int64, torch.int32, torch.int16)


@Kernel
def copy_rows_kernel(
    matrix,  # (N, C)
    out,  # (n, columns of its own)
    valid_tokens,  # ValidTokens, whose rows are copied and zeros behind them up to a multiple of 128; None for all
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


def launch_copy_rows(matrix: Tensor, out: Tensor, valid_tokens: ValidTokens | None = None) -> None:
    (n, width), block_n, block_c = out.shape, 8, 512
    sizes = n, matrix.shape[1], width
    copy_rows_kernel[(triton.cdiv(n, block_n), triton.cdiv(width, block_c))](
        matrix_of(matrix), matrix_of(out), valid_tokens, *sizes, BLOCK_N=block_n, BLOCK_C=block_c
    )


def copied_rows(matrices: Sequence[Tensor], columns: int) -> list[Tensor]:
    """Of each the first `columns`, and zeros where it has fewer: (N, columns), contiguous."""
    outs = [matrix.new_empty(matrix.shape[0], columns) for matrix in matrices]
    if outs:
        with torch.cuda.device_of(outs[0]):
            repeated(copy_step, tuple(matrices), columns, fresh=outs)
    return outs


def copy_step(matrices: tuple[Tensor, ...], columns: int, *outs: Tensor) -> None:
    """`columns` is of outs: a part of what calls are told apart by.

    Entries go as integers of 8, 4 or 2 bytes, the widest that both rows are made of: rows that do not start on 16 bytes
    cannot be read by more, and ATen moves them number by number.
    """
    for matrix, out in zip(matrices, outs):
        if out.numel():
            integer = next(integer for integer in INTEGERS if fits(matrix, integer) and fits(out, integer))
            launch_copy_rows(matrix.view(integer), out.view(integer))


def fits(matrix: Tensor, integer: torch.dtype) -> bool:
    """Whether rows are made of such integers; of the matrix's own size they always are."""
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
    """A program owns some columns. It reads a block of rows and then writes it: what it reads afterwards lies before
    the block, and no barrier waits for the writes. Where all tokens are valid there is nothing to do."""
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.where(tl.load(count_ptr) < N, tl.cdiv(N, BLOCK_N), 0)
    for block in range(0, blocks):
        rows = (blocks - 1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.load(place_ptr + rows, mask=rows < N, other=-1)
        values = load_tile(matrix, place, cols, place >= 0, cols < D)
        tl.debug_barrier()  # all of the block is read before any of it is written
        store_tile(matrix, values, rows, cols, rows < N, cols < D)


def launch_spread_rows(matrix: Tensor, valid_tokens: ValidTokens, place: Tensor) -> None:
    """Zeros where no token is valid."""
    tokens, columns = matrix.shape
    # 64 bytes of half numbers; 128 programs at D = 4096, where fewer columns each took 1.5 times as long. Fewer rows at
    # a time wait for the memory more often: H200, 23 us at 8192x1024, 33 with 256 rows.
    block_d = 64 if interpreted(matrix) else 32
    spread_rows_kernel[(triton.cdiv(columns, block_d),)](
        matrix_of(matrix), place, valid_tokens.total, tokens, columns, BLOCK_N=1024, BLOCK_D=block_d, num_warps=8
    )
