"""The factors of a row of the logit gradient, once its lse is known: what the epilogue "gradient" reads.

    G_ij = (row_factor_i + shift_factor_i (z_ij - lse_i)) p_ij + sum_factor_i w_j,  and at the target + target_i

of the cotangents a, l, m and h of target_logit, lse, logit_sum and expected_log_prob, hbar:

    row_factor = l - h hbar      shift_factor = h      sum_factor = m      target = a

as the derivative of hbar = sum_j p_j (z_j - lse) by z_j is p_j (z_j - lse - hbar). Kernels have logits
in base 2 (times log2 e).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.objectives.in_triton import number
from flce_ops.triton.gemm.epilogues import Gradient
from flce_ops.triton.gemm.logits_gemm import LOG2E
from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.gather_tokens import AtTarget
from flce_ops.triton.rows.kept_tokens import Kept, kept_rows, row_vectors
from flce_ops.triton.rows.slot_entries import launch_slot_entries

# N tokens, n rows of a chunk, V vocabulary

BLOCK_N = 64


class KnownRows(NamedTuple):
    """What forward and the cotangents say of every token, (N,) float32, as the tokens stand; None where absent."""

    lse: Tensor
    lse_rest: Tensor | None
    expected_log_prob: Tensor | None
    grad_target_logit: Tensor | None  # (N, K) of several classes a token
    grad_lse: Tensor | None
    grad_logit_sum: Tensor | None
    grad_expected_log_prob: Tensor | None


@triton.jit
def of_tokens(pointer, token, mask):
    return tl.load(pointer + token, mask=mask, other=0.0)


@Kernel
def gradient_factors_kernel(
    tokens,  # KnownRows
    target_logit2_ptr,  # (n,)
    dz_du_ptr,  # (n,) dz/du / logit_scale at the target; None without a softcap
    column_ptr,  # (n,) the target's, -1 where it is not here
    rows,  # Gradient, out, its class weights apart
    at_target_ptr,  # (n,) out, G at the target; None where slot_entries.py makes it
    residual_ptr,  # (n,) out, what rounding it takes
    logit_scale_ptr,  # ()
    kept,  # Kept
    n,
    HALF: tl.constexpr,  # dtype of G
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < kept_rows(kept, n)
    token = tl.load(kept.order + i, mask=mask, other=0)
    scale = number(logit_scale_ptr)

    lse = of_tokens(tokens.lse, token, mask)
    lse64 = lse.to(tl.float64)
    if tokens.lse_rest is not None:
        lse64 += of_tokens(tokens.lse_rest, token, mask).to(tl.float64)
    exact_lse2 = lse64 * tl.full((BLOCK_N,), 1.4426950408889634, tl.float64)
    lse2 = exact_lse2.to(tl.float32)
    share = tl.exp2((lse2.to(tl.float64) - exact_lse2).to(tl.float32))  # of exp2(z2 - lse2): what rounding lse2 takes

    row_factor = tl.zeros((BLOCK_N,), tl.float32)
    if tokens.grad_lse is not None:
        row_factor += of_tokens(tokens.grad_lse, token, mask)
    if tokens.grad_expected_log_prob is not None:
        grad_expected = of_tokens(tokens.grad_expected_log_prob, token, mask)
        row_factor -= grad_expected * of_tokens(tokens.expected_log_prob, token, mask)
        # z2 - lse2 is taken of the rounded lse2
        row_factor += grad_expected / LOG2E * (lse2.to(tl.float64) - exact_lse2).to(tl.float32)
    row_factor *= share
    tl.store(rows.reference_logit + i, lse2, mask=mask)
    tl.store(rows.row_factor + i, row_factor * scale, mask=mask)
    if tokens.grad_expected_log_prob is not None:
        shift_factor = grad_expected / LOG2E * share
        tl.store(rows.shift_factor + i, shift_factor * scale, mask=mask)
    if tokens.grad_logit_sum is not None:
        sum_factor = of_tokens(tokens.grad_logit_sum, token, mask)
        tl.store(rows.sum_factor + i, sum_factor * scale, mask=mask)
    if at_target_ptr is not None:
        column = tl.load(column_ptr + i, mask=mask, other=-1)
        target_logit2 = tl.load(target_logit2_ptr + i, mask=mask, other=0.0)
        at_target = row_factor
        if tokens.grad_expected_log_prob is not None:
            # a target that a bias of -inf switches off has p log p = 0, not 0 * -inf
            distance = target_logit2 - lse2
            at_target += shift_factor * tl.where(distance < -1e4, -1e4, distance)
        at_target *= tl.exp2(target_logit2 - lse2)
        if tokens.grad_target_logit is not None:
            at_target += tl.where(column >= 0, of_tokens(tokens.grad_target_logit, token, mask), 0.0)
        if tokens.grad_logit_sum is not None:
            if rows.class_weight is not None:
                sum_factor *= tl.load(rows.class_weight + tl.where(column >= 0, column, 0), mask=mask, other=0.0)
            at_target += sum_factor
        if dz_du_ptr is not None:
            at_target *= tl.load(dz_du_ptr + i, mask=mask, other=0.0)
        at_target *= scale
        tl.store(at_target_ptr + i, at_target, mask=mask)
        tl.store(residual_ptr + i, at_target - at_target.to(HALF).to(tl.float32), mask=mask)


def launch_gradient_factors(
    tokens: KnownRows,
    at_target: AtTarget,
    class_weight: Tensor | None,  # (V,) float32
    dtype: torch.dtype,  # of G
    kept: Kept,
    *,
    logit_scale: Tensor | None,  # ()
) -> tuple[Gradient, Tensor, Tensor, Tensor]:
    """The epilogue's operands, G at the target in float32, what rounding takes of it, and the column of the latter.

    (n,) each; of several classes a token G is (n, K), and the others are of the largest.
    """
    target_logit2, dz_du, column, *_ = at_target
    n, slots = column.shape[0], column.dim() == 2
    lse2, row_factor, at_target_entry, residual, sum_factor, shift_factor = row_vectors(tokens.lse, 6, n)
    rows = Gradient(
        lse2,
        row_factor,
        class_weight,
        None if tokens.grad_logit_sum is None else sum_factor,
        None if tokens.grad_expected_log_prob is None else shift_factor,
    )
    half = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
    gradient_factors_kernel[(triton.cdiv(n, BLOCK_N),)](
        tokens,
        target_logit2,
        dz_du,
        column,
        rows,
        None if slots else at_target_entry,
        residual,
        logit_scale,
        kept,
        n,
        HALF=half,
        BLOCK_N=BLOCK_N,
        num_warps=2,
    )
    if slots:
        of_slots = launch_slot_entries(rows, at_target, tokens.grad_target_logit, half, kept, logit_scale=logit_scale)
        return rows, *of_slots
    return rows, at_target_entry, residual, column
