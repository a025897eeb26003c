"""sum_i factor_i matrix_ij in float32, in a fixed order: the bias gradient, label smoothing, sums over tiles."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.replay import Kernel

# n rows, C columns, S slices of the rows

PROGRAMS = 1024  # some eight a multiprocessor
ROWS_AT_LEAST = 128  # of a slice
BLOCKS = {"BLOCK_R": 32, "BLOCK_C": 128}


@Kernel
@triton.jit
def weighted_column_sum_kernel(
    matrix_ptr,  # (n, C)
    factor_ptr,  # (n,) float32
    partial_ptr,  # (S, C) out
    kept,  # Kept, whose rows are summed; None for all
    n,
    C,
    stride_r,
    stride_c,
    rows_per_split,
    GATHERED: tl.constexpr,  # the rows stand in the order of the kept tokens
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program owns BLOCK_C columns of one of S slices of the rows."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * rows_per_split
    rows_to_sum = n
    if kept is not None:
        rows_to_sum = kept_rows(kept, n)
    last = tl.minimum(first + rows_per_split, rows_to_sum)
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows[:, None] < last) & (cols[None, :] < C)
        places = rows
        if not GATHERED:
            places = tl.load(kept.order + rows, mask=rows < last, other=0)
        values = tl.load(
            matrix_ptr + places[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c,
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        if factor_ptr is not None:
            values *= tl.load(factor_ptr + rows, mask=rows < last, other=0.0)[:, None]
        acc += values
    tl.store(partial_ptr + split.to(tl.int64) * C + cols, tl.sum(acc, 0), mask=cols < C)


def grid_of_sums(rows: int, columns: int) -> tuple[int, int]:
    """Blocks of columns, and slices of the rows for each: programs that keep a GPU's memory busy."""
    column_blocks = triton.cdiv(columns, BLOCKS["BLOCK_C"])
    return column_blocks, max(1, min(rows // ROWS_AT_LEAST, triton.cdiv(PROGRAMS, column_blocks)))


def weighted_column_sum(
    matrix: Tensor,  # (n, C)
    factor: Tensor | None,  # (n,) float32; None for 1
    kept: Kept | None = None,  # the rows to sum; None for all
    *,
    gathered: bool = True,  # the rows stand in the order of the kept tokens, as `factor` does in any case
) -> Tensor:  # (C,) float32
    """In two steps, as many parts as keep a GPU's memory busy. Their sum is the sum of a matrix again."""
    rows, columns = matrix.shape
    column_blocks, splits = grid_of_sums(rows, columns)
    partial = torch.empty(splits, columns, dtype=torch.float32, device=matrix.device)
    weighted_column_sum_kernel[(column_blocks, splits)](
        matrix,
        factor,
        partial,
        kept,
        rows,
        columns,
        *matrix.stride(),
        triton.cdiv(rows, splits),
        GATHERED=gathered,
        **BLOCKS,
        num_warps=4,
    )
    return partial[0] if splits == 1 else weighted_column_sum(partial, None)
