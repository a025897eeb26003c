"""sum_i factor_i matrix_ij in float32, in a fixed order: the bias gradient and the rank-1 terms of label smoothing."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.replay import Kernel

# n rows, C columns


@Kernel
@triton.jit
def weighted_column_sum_kernel(
    matrix_ptr,  # (n, C)
    factor_ptr,  # (n,) float32
    partial_ptr,  # (S, C) out
    kept,  # Kept, of the rows; None for all
    n,
    C,
    stride_r,
    stride_c,
    rows_per_split,
    HAS_FACTOR: tl.constexpr,
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
    acc = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows[:, None] < last) & (cols[None, :] < C)
        values = tl.load(
            matrix_ptr + rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c,
            mask=mask,
            other=0.0,
        ).to(tl.float32)
        if HAS_FACTOR:
            factor = tl.load(factor_ptr + rows, mask=rows < last, other=0.0)[:, None]
            values = tl.where(factor == 0.0, 0.0, values * factor)  # whatever an ignored token's row holds
        acc += tl.sum(values, 0)
    tl.store(partial_ptr + split.to(tl.int64) * C + cols, acc, mask=cols < C)


def weighted_column_sum(matrix: Tensor, factor: Tensor | None, kept: Kept | None = None) -> Tensor:  # (C,) float32
    rows, columns = matrix.shape
    block_r, block_c = 32, 128
    splits = max(1, min(16, rows // 1024))
    partial = torch.empty(splits, columns, dtype=torch.float32, device=matrix.device)
    weighted_column_sum_kernel[(triton.cdiv(columns, block_c), splits)](
        matrix,
        factor,
        partial,
        kept,
        rows,
        columns,
        *matrix.stride(),
        triton.cdiv(rows, splits),
        HAS_FACTOR=factor is not None,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return partial.sum(0)
