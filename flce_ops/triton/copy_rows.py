"""Rows of one length copied to rows of another: what is missing at their end becomes 0, what is too much stays behind.

Entries go as integers of 8, 4 or 2 bytes, the widest that both rows are made of: rows that do not start on 16 bytes
cannot be read by more, and ATen moves them number by number.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.replay import Kernel, repeated

# N rows, C columns

INTEGERS = (torch.int64, torch.int32, torch.int16)
TILE = 8, 512


@Kernel
@triton.jit
def copy_rows_kernel(
    matrix_ptr,  # (N, C)
    out_ptr,  # (N, columns of its own)
    N,
    C,
    out_columns,
    stride_n,
    stride_c,
    stride_out_n,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    held = (rows < N)[:, None] & (cols < C)[None, :]
    values = tl.load(matrix_ptr + rows[:, None] * stride_n + cols[None, :] * stride_c, mask=held, other=0)
    held = (rows < N)[:, None] & (cols < out_columns)[None, :]
    tl.store(out_ptr + rows[:, None] * stride_out_n + cols[None, :], values, mask=held)


def copied_rows(matrices: Sequence[Tensor], columns: int) -> list[Tensor]:
    """Of each the first `columns`, and zeros where it has fewer: (N, columns), contiguous."""
    outs = [matrix.new_empty(matrix.shape[0], columns) for matrix in matrices]
    if outs:
        with torch.cuda.device_of(outs[0]):
            repeated(copy_step, tuple(matrices), columns, fresh=outs)
    return outs


def copy_step(matrices: tuple[Tensor, ...], columns: int, *outs: Tensor) -> None:
    """`columns` is of outs: a part of what calls are told apart by."""
    for matrix, out in zip(matrices, outs):
        if out.numel():
            launch_copy_rows(matrix, out)


def launch_copy_rows(matrix: Tensor, out: Tensor) -> None:
    integer = next(integer for integer in INTEGERS if fits(matrix, integer) and fits(out, integer))
    matrix, out = matrix.view(integer), out.view(integer)
    (rows, columns), (block_n, block_c) = out.shape, TILE
    copy_rows_kernel[(triton.cdiv(rows, block_n), triton.cdiv(columns, block_c))](
        matrix, out, rows, matrix.shape[1], columns, *matrix.stride(), out.stride(0), BLOCK_N=block_n, BLOCK_C=block_c
    )


def fits(matrix: Tensor, integer: torch.dtype) -> bool:
    """Whether rows are made of such integers; of the matrix's own size they always are."""
    size, own = integer.itemsize, matrix.element_size()
    whole = all(number * own % size == 0 for number in (matrix.shape[1], matrix.stride(0)))
    return size == own or (matrix.stride(1) == 1 and whole and matrix.data_ptr() % size == 0)
