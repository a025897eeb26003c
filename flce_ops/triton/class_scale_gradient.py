"""The gradient by a number a class that multiplies logits, of the exponentials that the two GEMMs read too.

    u_ij = c_j t_ij + b_j          E_ij = c_j exp(z_ij - r_i), z = s u          f_i E_ij = c_j dL/du_ij

    dL/dc_j = sum_i dL/du_ij t_ij = sum_i f_i E_ij (z_ij / s - b_j) / c_j^2      z_ij = log(E_ij / c_j) + r_i

What rounding E to bfloat16 takes from z is 2^-9 at most, from t that over s c_j. The target's entry is no exponential:
its logit is known. It is one more read of E. Of c_j = 0 nothing is left to read it from: nan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.columns import PROGRAMS, ROWS_AT_LEAST, weighted_column_sum
from flce_ops.triton.finish_rows import Tokens
from flce_ops.triton.kept_tokens import kept_rows
from flce_ops.triton.replay import Kernel
from flce_ops.triton.row_divergence import log2_within_2_22

# n rows of a chunk, V vocabulary, S slices of the rows


@Kernel
@triton.jit
def logit_products_kernel(
    exponentials_ptr,  # (n, V)
    class_scale_ptr,  # (V,) float32
    factor_ptr,  # (n,) f, and the next three
    reference_ptr,  # r in base 2
    target_logit_ptr,  # base 2
    column_ptr,  # int64, the target's, -1 where there is none
    partial_ptr,  # (S, V) out
    kept,  # Kept
    n,
    V,
    stride_n,
    rows_per_split,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program owns BLOCK_C classes of one of S slices of the rows."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, kept_rows(kept, n))
    class_scale = tl.load(class_scale_ptr + cols, mask=cols < V, other=1.0)[None, :]
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        row_mask = rows < last
        mask = row_mask[:, None] & (cols < V)[None, :]
        places = exponentials_ptr + rows.to(tl.int64)[:, None] * stride_n + cols[None, :]
        entry = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        exponential = entry / class_scale
        reference = tl.load(reference_ptr + rows, mask=row_mask, other=0.0)[:, None]
        logit = log2_within_2_22(tl.where(exponential > 0.0, exponential, 1.0)) + reference
        logit = tl.where(exponential > 0.0, logit, 0.0)
        column = tl.load(column_ptr + rows, mask=row_mask, other=-1)[:, None]
        target_logit = tl.load(target_logit_ptr + rows, mask=row_mask, other=0.0)[:, None]
        logit = tl.where(column == cols[None, :], target_logit, logit)
        acc += tl.load(factor_ptr + rows, mask=row_mask, other=0.0)[:, None] * entry * logit
    tl.store(partial_ptr + split.to(tl.int64) * V + cols, tl.sum(acc, 0), mask=cols < V)


def logit_products(
    exponentials: Tensor,  # (n, V)
    class_scale: Tensor,  # (V,) float32
    factor: Tensor,  # (n,)
    reference: Tensor,  # (n,)
    tokens: Tokens,
) -> Tensor:  # (V,), sum_i f_i E_ij z_ij in base 2
    rows, classes = exponentials.shape
    block_r, block_c = 32, 128
    column_blocks = triton.cdiv(classes, block_c)
    splits = max(1, min(rows // ROWS_AT_LEAST, triton.cdiv(PROGRAMS, column_blocks)))
    partial = torch.empty(splits, classes, dtype=torch.float32, device=exponentials.device)
    logit_products_kernel[(column_blocks, splits)](
        exponentials,
        class_scale,
        factor,
        reference,
        tokens.target_logit,
        tokens.column,
        partial,
        tokens.kept,
        rows,
        classes,
        exponentials.stride(0),
        triton.cdiv(rows, splits),
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return partial[0] if splits == 1 else weighted_column_sum(partial, None)
