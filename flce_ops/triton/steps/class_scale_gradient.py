"""The gradient by a class scale, a number a class that multiplies the logits (DoRA), from the exponentials that the
gradient GEMMs read.

    u_ij = c_j t_ij + b_j          E_ij = c_j exp(z_ij - r_i), z = s u          f_i E_ij = c_j dL/du_ij

    dL/dc_j = sum_i dL/du_ij t_ij = sum_i f_i E_ij (z_ij / s - b_j) / c_j^2      z_ij = log(E_ij / c_j) + r_i

Rounding E to bfloat16 changes z by at most 2^-9, and so t by at most 2^-9 / (s c_j). The target's entry of E holds no
exponential, but the target's logit is known. This costs one more read of E. If |c_j| < 1/8, the products t of a block
of classes are computed again:

    dL/dc_j = sum_i f_i E_ij t_ij / c_j

The step replaces |c_j| below 2^-40 by 2^-40, so that E is not lost where c_j = 0.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...objectives.in_triton import LN2, log2_within_2_22
from ..gemm.tma import load_tile, matrix_of
from ..launch.replay import Kernel
from ..rows.column_sums import sum_over_rows
from ..rows.finish_rows import Tokens
from ..rows.valid_tokens import valid_rows
from .low_rank_pair import Pair, add_pair_product

# n rows of a chunk, D hidden, V vocabulary, r rank of the pair, S slices of the rows

# if |c_j| is smaller, rounding E changes t by more than the error of a product of bfloat16 numbers
SMALL = tl.constexpr(0.125)
LEAST = 2.0**-40


@Kernel
def logit_products_kernel(
    exponentials,  # (n, V)
    partial_ptr,  # (S, V) out
    n,
    V,
    rows_per_split,
    factor_ptr,  # (n,) f
    reference_ptr,  # (n,) r in base 2
    tokens,  # Tokens
    input,  # (n, D) the chunk's tokens
    linear_weight,  # (V, D)
    pair,  # Pair, of the chunk
    D,
    RANK: tl.constexpr,  # r of the pair
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Computes sum_i f_i E_ij z_ij, with t_ij in place of z_ij where |c_j| < SMALL.

    One program sums BLOCK_C classes over one of S slices of the rows.
    """
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, valid_rows(tokens.valid_tokens, n))
    col_mask = cols < V
    class_scale = tl.load(pair.class_scale + cols, mask=col_mask, other=1.0)[None, :]
    small = tl.abs(class_scale) < SMALL
    any_small = tl.max(small.to(tl.int32)) > 0
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        row_mask = rows < last
        entry = load_tile(exponentials, rows, cols, row_mask, col_mask).to(tl.float32)
        exponential = entry / class_scale
        reference = tl.load(reference_ptr + rows, mask=row_mask, other=0.0)[:, None]
        logit = log2_within_2_22(tl.where(exponential > 0.0, exponential, 1.0)) + reference
        logit = tl.where(exponential > 0.0, logit, 0.0)
        column = tl.load(tokens.column + rows, mask=row_mask, other=-1)[:, None]
        target_logit = tl.load(tokens.target_logit + rows, mask=row_mask, other=0.0)[:, None]
        logit = tl.where(column == cols[None, :], target_logit, logit)
        if any_small:
            product = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            for d in range(0, D, BLOCK_D):
                ks = d + tl.arange(0, BLOCK_D)
                x = load_tile(input, rows, ks, row_mask, ks < D)
                w = load_tile(linear_weight, cols, ks, col_mask, ks < D)
                product = tl.dot(x, w.T, product)
            product = add_pair_product(product, pair.input, pair.weight, rows, cols, row_mask, col_mask, RANK, BLOCK_D)
            logit = tl.where(small, product, logit)
        acc += tl.load(factor_ptr + rows, mask=row_mask, other=0.0)[:, None] * entry * logit
    tl.store(partial_ptr + split.to(tl.int64) * V + cols, tl.sum(acc, 0), mask=cols < V)


def logit_products(
    exponentials: Tensor,  # (n, V)
    input: Tensor,  # (n, D), the chunk's
    linear_weight: Tensor,  # (V, D)
    pair: Pair,  # of the chunk
    factor: Tensor,  # (n,)
    reference: Tensor,  # (n,)
    tokens: Tokens,
) -> Tensor:  # (V,), input of gradient_of_scale
    of_rows = factor, reference, tokens
    head = matrix_of(input), matrix_of(linear_weight), pair, input.shape[1]
    return sum_over_rows(logit_products_kernel, exponentials, *of_rows, *head, RANK=pair.rank, BLOCK_D=64)


def away_from_zero(class_scale: Tensor) -> Tensor:  # (V,)
    """The scale as float32, with an absolute value of at least LEAST."""
    return class_scale.float().abs().clamp(min=LEAST).copysign(class_scale).contiguous()


def gradient_of_scale(
    products: Tensor,  # (V,), result of logit_products
    gradient_sum: Tensor,  # (V,), sum_i f_i E_ij, read only with linear_bias
    class_scale: Tensor,  # (V,)
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Tensor | None,  # ()
) -> Tensor:  # (V,)
    of_logits = products * LN2.value
    if logit_scale is not None:
        of_logits /= logit_scale
    if linear_bias is not None:
        of_logits -= linear_bias * gradient_sum
    return torch.where(class_scale.abs() < SMALL.value, products, of_logits / class_scale) / class_scale
