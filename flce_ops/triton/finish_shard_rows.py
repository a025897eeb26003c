"""Rows of a chunk on a rank that holds some of the classes: what it tells the others, and what all of them make of it.

Logits, references and log-sums are in base 2 (times log2 e), but for the losses.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.finish_rows import row_factor_of, store_target_entry, with_target
from flce_ops.triton.logits_gemm import LN2, number_at

# n rows of a chunk, R ranks that share the vocabulary, k numbers a row of each

BLOCK_N = 64

# lse2 - r beyond this: this rank's classes have probabilities below 2^-30, and 2^-90 leaves c * input normal numbers.
LARGEST_EXPONENT = tl.constexpr(90.0)


@triton.jit
def own_row_sum(row_sum_ptr, reference_ptr, own_logit_ptr, column_ptr, rows, mask):
    """s_i of this rank, the target's share of it, the reference, the target's logit, and whether it is here."""
    reference = tl.load(reference_ptr + rows, mask=mask, other=0.0)
    own_logit = tl.load(own_logit_ptr + rows, mask=mask, other=0.0)
    hit = tl.load(column_ptr + rows, mask=mask, other=-1) >= 0
    row_sum = tl.load(row_sum_ptr + rows, mask=mask, other=1.0)
    row_sum, at_target = with_target(row_sum, reference, own_logit, hit)
    return row_sum, at_target, reference, own_logit, hit


@triton.jit
def shard_numbers_kernel(
    row_sum_ptr,  # (n,) s_i = sum_j exp2(z2_ij - reference_i) over this rank's classes
    reference_ptr,  # (n,)
    own_logit_ptr,  # (n,) z2 of the target where this rank holds it, of any class elsewhere
    column_ptr,  # (n,) int64, the target's column on this rank, -1 elsewhere
    numbers_ptr,  # (k, n) out: lse2 of this rank's classes, z2 of the target or 0
    n,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < n
    row_sum, _, reference, own_logit, hit = own_row_sum(
        row_sum_ptr, reference_ptr, own_logit_ptr, column_ptr, rows, mask
    )
    tl.store(numbers_ptr + rows, reference + tl.log2(row_sum), mask=mask)
    tl.store(numbers_ptr + n + rows, tl.where(hit, own_logit, 0.0), mask=mask)


def launch_shard_numbers(
    row_sum: Tensor,  # (n,)
    reference: Tensor,  # (n,)
    own_logit: Tensor,  # (n,)
    column: Tensor,  # (n,)
    numbers: Tensor,  # (k, n), of which the first two are written
) -> None:
    rows = row_sum.shape[0]
    grid = (triton.cdiv(rows, BLOCK_N),)
    shard_numbers_kernel[grid](row_sum, reference, own_logit, column, numbers, rows, BLOCK_N=BLOCK_N, num_warps=2)


@triton.jit
def finish_shard_rows_kernel(
    gathered_ptr,  # (R, k, n) every rank's numbers
    row_sum_ptr,  # (n,)
    reference_ptr,  # (n,) r_i
    own_logit_ptr,  # (n,)
    target_slope_ptr,  # (n,) dz/du / logit_scale at own_logit, with a softcap
    column_ptr,  # (n,) int64
    target_ptr,  # (n,)
    row_scale_ptr,  # (n,) a_i
    target_weight_ptr,  # (n,) float32, class weight of the target
    entry_ptr,  # (n,) out, E'_iy in E's dtype
    losses_ptr,  # (n,) out
    row_factor_ptr,  # (n,) out, c_i
    weight_factor_ptr,  # (n,) out, c_i with the rounding of E_iy taken up
    residual_ptr,  # (n,) out, c_i times that rounding
    n,
    ranks,
    stride_rank,
    ignore_index,
    z_loss_ptr,  # ()
    logit_scale_ptr,  # ()
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As finish_rows.py, with the lse of whole rows in place of this rank's row sum:

        lse2 = log2 sum_r 2^lse2_r
        c = a L logit_scale 2^-(lse2 - r)      E'_iy = (E_iy - f / L 2^(lse2 - r)) slope_y

    where this rank holds the target, E' = E elsewhere.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < n
    largest = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    target_logit = tl.zeros((BLOCK_N,), tl.float32)
    for rank in range(ranks):
        numbers = gathered_ptr + rank * stride_rank + rows
        largest = tl.maximum(largest, tl.load(numbers, mask=mask, other=0.0))
        target_logit += tl.load(numbers + n, mask=mask, other=0.0)
    finite = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for rank in range(ranks):
        total += tl.exp2(tl.load(gathered_ptr + rank * stride_rank + rows, mask=mask, other=0.0) - finite)
    lse2 = finite + tl.log2(total)
    lse = lse2 * LN2

    row_sum, at_target, reference, _, hit = own_row_sum(
        row_sum_ptr, reference_ptr, own_logit_ptr, column_ptr, rows, mask
    )
    valid = mask & (tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int64) != ignore_index)
    target_factor = tl.full((BLOCK_N,), 1.0, tl.float32)
    if HAS_CLASS_WEIGHT:
        target_factor = tl.load(target_weight_ptr + rows, mask=mask, other=0.0)
    loss = target_factor * (lse2 - target_logit) * LN2
    slope = target_factor
    if z_loss_ptr is not None:
        z_loss = tl.load(z_loss_ptr).to(tl.float32)
        loss += z_loss * lse * lse
        slope += 2.0 * z_loss * lse
    tl.store(losses_ptr + rows, tl.where(valid, loss, 0.0), mask=mask)

    factor, slope = row_factor_of(tl.load(row_scale_ptr + rows, mask=mask, other=0.0), slope, target_factor)
    # 0 where a bias of -inf switches off all classes of this rank (nan if those of all ranks)
    exponent = tl.where(row_sum > 0.0, lse2 - reference, 0.0 * lse2)
    exponent = tl.where(exponent > LARGEST_EXPONENT, LARGEST_EXPONENT, exponent)
    store_target_entry(
        at_target - target_factor / slope * tl.exp2(exponent),
        tl.where(valid, factor * number_at(logit_scale_ptr, 1.0) * tl.exp2(-exponent), 0.0),
        hit,
        target_slope_ptr,
        entry_ptr,
        row_factor_ptr,
        weight_factor_ptr,
        residual_ptr,
        rows,
        mask,
        HAS_SOFTCAP,
    )


def launch_finish_shard_rows(
    gathered: Tensor,  # (R, k, n)
    *,
    row_sum: Tensor,  # (n,)
    reference: Tensor,  # (n,)
    own_logit: Tensor,  # (n,)
    target_slope: Tensor | None,  # (n,)
    column: Tensor,  # (n,)
    target: Tensor,  # (n,)
    row_scale: Tensor,  # (n,)
    target_weight: Tensor | None,  # (n,)
    entry: Tensor,  # (n,)
    losses: Tensor,  # (n,)
    row_factor: Tensor,  # (n,)
    weight_factor: Tensor,  # (n,)
    residual: Tensor,  # (n,)
    ignore_index: int,
    z_loss: Tensor | None,  # ()
    logit_scale: Tensor | None,  # ()
) -> None:
    rows = row_sum.shape[0]
    finish_shard_rows_kernel[(triton.cdiv(rows, BLOCK_N),)](
        gathered,
        row_sum,
        reference,
        own_logit,
        target_slope,
        column,
        target,
        row_scale,
        target_weight,
        entry,
        losses,
        row_factor,
        weight_factor,
        residual,
        rows,
        gathered.shape[0],
        gathered.stride(0),
        ignore_index,
        z_loss,
        logit_scale,
        HAS_CLASS_WEIGHT=target_weight is not None,
        HAS_SOFTCAP=target_slope is not None,
        BLOCK_N=BLOCK_N,
        num_warps=2,
    )
