"""Loss and row factors of a chunk once its row sums are known.

Logits named reference and target_logit are in base 2 (times log2 e).
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.logits_gemm import LN2, number_at

# n rows of a chunk, V vocabulary


@triton.jit
def with_target(row_sum, reference, target_logit, hit):
    """The row sum and the target's share of it: it was summed from another order of the same products."""
    at_target = tl.exp2(target_logit - reference)
    return tl.where(hit & (row_sum < at_target), at_target, row_sum), at_target


@triton.jit
def apart_from_zero(slope):
    """c E' must stay finite where the slope vanishes (class weight 0, or z_loss against a very negative lse)."""
    return tl.where(tl.abs(slope) > 1e-20, slope, 1e-20)


@triton.jit
def row_factor_of(scale, slope, target_factor):
    """(c_i s_i / logit_scale, L) for a scale a_i and a slope L. inf times a slope of 0 stays the nan it is in ATen.

    A row without slope and target, of a class of weight 0, has gradient 0.
    """
    exact = scale * slope
    nothing = (slope == 0.0) & (target_factor == 0.0)
    slope = apart_from_zero(slope)
    return tl.where((exact == exact) & (nothing == 0), scale * slope, exact), slope


@triton.jit
def store_target_entry(
    entry,  # E'_iy, before softcap's slope
    row_factor,  # c_i
    hit,
    target_slope_ptr,
    entry_ptr,
    row_factor_ptr,
    weight_factor_ptr,
    residual_ptr,
    rows,
    mask,
    HAS_SOFTCAP: tl.constexpr,
):
    """The target's entry dominates its row, and its rounding the error of the gradients. grad_linear_weight's factor
    takes it up: E_iy comes out exact, the other entries of the row, each for another class, move by less than 2^-8
    together. In grad_input they add up, along whatever linear_weight's rows share, so there the residual is
    added by itself.

    A row factor of inf (a normalizer of 0) times the target's entry is inf - inf, and so is what sums over it.
    """
    entry = tl.where(tl.abs(row_factor) == float("inf"), float("nan"), entry)
    if HAS_SOFTCAP:
        entry *= tl.load(target_slope_ptr + rows, mask=mask, other=0.0)
    rounded = entry.to(entry_ptr.dtype.element_ty)
    tl.store(entry_ptr + rows, rounded, mask=mask)
    rounded = rounded.to(tl.float32)
    correction = tl.where(hit & (tl.abs(rounded) > 0.0), entry / rounded, 1.0)  # 1 for nan, too
    tl.store(row_factor_ptr + rows, row_factor, mask=mask)
    tl.store(weight_factor_ptr + rows, row_factor * correction, mask=mask)
    tl.store(residual_ptr + rows, row_factor * (entry - rounded), mask=mask)


@triton.jit
def finish_rows_kernel(
    row_sum_ptr,  # (n,) s_i = sum_j exp2(z2_ij - reference_i)
    reference_ptr,  # (n,)
    target_logit_ptr,  # (n,) z2 of the target
    target_slope_ptr,  # (n,) dz/du / logit_scale there, with a softcap
    target_ptr,  # (n,)
    row_scale_ptr,  # (n,) a_i
    class_weight_ptr,  # (V,) float32
    weight_sum_ptr,  # () sum of the class weights
    logit_sum_ptr,  # (n,) sum_j w_j z2_ij
    entry_ptr,  # (n,) out, E'_iy in E's dtype
    losses_ptr,  # (n,) out
    row_factor_ptr,  # (n,) out, c_i
    weight_factor_ptr,  # (n,) out, c_i with the rounding of E_iy taken up
    residual_ptr,  # (n,) out, c_i times that rounding
    n,
    V,
    ignore_index,
    label_smoothing,
    z_loss_ptr,  # ()
    logit_scale_ptr,  # ()
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Losses, and the two numbers a row that turn E into the gradient of the logits.

    With L = d loss / d lse and f the target's factor (flce_ops/math/loss.py), p = E / s and without label smoothing

        G_ij = a (L p_ij - f [j = y]) dz/du = c E'_ij        c = a L logit_scale / s
                                                            E'_iy = (E_iy - s f / L) slope_y,  E' = E elsewhere

    so the row factor goes to the (n, D) sides of the two GEMMs and E is not read again.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < n
    row_sum = tl.load(row_sum_ptr + rows, mask=mask, other=1.0)
    reference = tl.load(reference_ptr + rows, mask=mask, other=0.0)
    target_logit = tl.load(target_logit_ptr + rows, mask=mask, other=0.0)
    target = tl.load(target_ptr + rows, mask=mask, other=0).to(tl.int64)
    valid = mask & (target != ignore_index)
    column = tl.where(valid & (target >= 0) & (target < V), target, 0)

    row_sum, at_target = with_target(row_sum, reference, target_logit, mask)

    target_factor = tl.full((BLOCK_N,), 1.0, tl.float32) - label_smoothing
    weight_sum = V * 1.0
    if HAS_CLASS_WEIGHT:
        target_factor *= tl.load(class_weight_ptr + column, mask=mask, other=0.0)
        weight_sum = tl.load(weight_sum_ptr)
    log2_sum = tl.log2(row_sum)
    lse = (reference + log2_sum) * LN2
    loss = target_factor * ((reference - target_logit) + log2_sum) * LN2
    slope = target_factor
    if HAS_SMOOTHING:
        smoothing = label_smoothing / V
        logit_sum = tl.load(logit_sum_ptr + rows, mask=mask, other=0.0) * LN2
        loss += smoothing * (weight_sum * lse - logit_sum)
        slope += smoothing * weight_sum
    if z_loss_ptr is not None:
        z_loss = tl.load(z_loss_ptr).to(tl.float32)
        loss += z_loss * lse * lse
        slope += 2.0 * z_loss * lse
    tl.store(losses_ptr + rows, tl.where(valid, loss, 0.0), mask=mask)

    factor, slope = row_factor_of(tl.load(row_scale_ptr + rows, mask=mask, other=0.0), slope, target_factor)
    store_target_entry(
        at_target - tl.where(valid, row_sum * target_factor / slope, 0.0),
        tl.where(valid, factor * number_at(logit_scale_ptr, 1.0) / row_sum, 0.0),
        mask,
        target_slope_ptr,
        entry_ptr,
        row_factor_ptr,
        weight_factor_ptr,
        residual_ptr,
        rows,
        mask,
        HAS_SOFTCAP,
    )


def launch_finish_rows(
    *,
    row_sum: Tensor,  # (n,)
    reference: Tensor,  # (n,)
    target_logit: Tensor,  # (n,)
    target_slope: Tensor | None,  # (n,)
    target: Tensor,  # (n,)
    row_scale: Tensor,  # (n,)
    class_weight: Tensor | None,  # (V,)
    weight_sum: Tensor | None,  # ()
    logit_sum: Tensor | None,  # (n,)
    entry: Tensor,  # (n,)
    num_classes: int,
    losses: Tensor,  # (n,)
    row_factor: Tensor,  # (n,)
    weight_factor: Tensor,  # (n,)
    residual: Tensor,  # (n,)
    ignore_index: int,
    label_smoothing: float,
    z_loss: Tensor | None,  # ()
    logit_scale: Tensor | None,  # ()
) -> None:
    rows = row_sum.shape[0]
    block = 64
    finish_rows_kernel[(triton.cdiv(rows, block),)](
        row_sum,
        reference,
        target_logit,
        target_slope,
        target,
        row_scale,
        class_weight,
        weight_sum,
        logit_sum,
        entry,
        losses,
        row_factor,
        weight_factor,
        residual,
        rows,
        num_classes,
        ignore_index,
        label_smoothing,
        z_loss,
        logit_scale,
        HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_SMOOTHING=label_smoothing != 0.0,
        HAS_SOFTCAP=target_slope is not None,
        BLOCK_N=block,
        num_warps=2,
    )
