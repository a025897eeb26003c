"""Loss and row factors of a chunk's kept tokens once its row sums are known.

Logits named reference_logit and target_logit are in base 2 (times log2 e), and so are sums of logits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.reduction import Reduction
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.kept_tokens import Kept, kept_rows, row_vectors, written_rows
from flce_ops.triton.logits_gemm import number_at
from flce_ops.triton.replay import Kernel
from flce_ops.triton.row_loss import RowLoss, row_loss
from flce_ops.triton.sum_losses import scale_of_rows

# n rows of a chunk, V vocabulary

BLOCK_N = 64


class Tokens(NamedTuple):
    """What is known of a chunk's tokens before the logits GEMM, and where their losses go.

    (n,) are in the order of the kept tokens, (N,) as the tokens stand.
    """

    kept: Kept
    target_logit: Tensor  # (n,) z2 of the target, or of column 0 where the target is not here
    target_dz_du: Tensor | None  # (n,) dz/du / logit_scale at target_logit, with a softcap; or its class scale
    column: Tensor  # (n,) int64, the target's, -1 where it is not here
    target_weight: Tensor | None  # (N,) float32, w_y; of a soft target (N, K), q_k w_yk, as are the three before
    reduction: Reduction  # of (N,) row scales g_i, or a mean
    losses: Tensor  # (N,) out


class FinishedRows(NamedTuple):
    """What the gradient GEMMs need of rows, (n,) each."""

    entry: Tensor  # E'_iy in E's dtype
    row_factor: Tensor  # c_i
    weight_factor: Tensor  # c_i with the rounding of E_iy taken up
    residual: Tensor  # c_i times that rounding
    column: Tensor | None = None  # int64, of a soft target: the class of the entry whose rounding it is
    row_sum: Tensor | None = None  # where ranks share a row: Z over all of them, of this rank's reference


def empty_rows(tokens: Tokens, dtype: torch.dtype) -> FinishedRows:
    n = tokens.column.shape[0]
    return FinishedRows(tokens.losses.new_empty(n, dtype=dtype), *row_vectors(tokens.losses, 3, n))


@triton.jit
def sums_of_rows(tokens, sums, i, mask):
    """Z_i, the target's share of it, the two logits of the row, and whether the target is here."""
    reference_logit = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    target_logit = tl.load(tokens.target_logit + i, mask=mask, other=0.0)
    hit = tl.load(tokens.column + i, mask=mask, other=-1) >= 0
    row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)
    at_target = tl.exp2(target_logit - reference_logit)
    # the target's share was summed from another order of the same products
    return tl.where(hit & (row_sum < at_target), at_target, row_sum), at_target, reference_logit, target_logit, hit


@triton.jit
def store_losses(
    tokens,
    sums,
    i,
    n,
    mask,
    surprisal2,  # (n,) lse - z_y in base 2
    lse2,  # (n,)
    loss,  # RowLoss
    logit_scale_ptr,  # ()
):
    """(l logit_scale, d_lse, d_target): l = g d_lse, and d_lse is made nonzero.

    c E' must stay finite where d_lse vanishes (class weight 0, or z_loss against a very negative lse). inf times a
    d_lse of 0 stays the nan it is in ATen, but a row that has neither derivative, of a class of weight 0, has
    gradient 0.
    """
    token = tl.load(tokens.kept.order + i, mask=i < n, other=0)
    logit_sum2 = None
    if sums.logit_sum is not None:
        logit_sum2 = tl.load(sums.logit_sum + i, mask=mask, other=0.0)
    target_weight = None
    if tokens.target_weight is not None:
        target_weight = tl.load(tokens.target_weight + token, mask=mask, other=0.0)
    value, d_lse, d_target = row_loss(surprisal2, lse2, logit_sum2, target_weight, loss)
    return store_and_scale(tokens, token, i, n, mask, value, d_lse, d_target, logit_scale_ptr)


@triton.jit
def store_and_scale(tokens, token, i, n, mask, value, d_lse, d_target, logit_scale_ptr):
    """Stores the losses; as store_losses."""
    tl.store(tokens.losses + token, tl.where(mask, value, 0.0), mask=written_rows(tokens.kept, i, n))
    row_scale = scale_of_rows(tokens.reduction, tokens.kept, token, mask)
    scaled = row_scale * d_lse
    no_gradient = (d_lse == 0.0) & (d_target == 0.0)
    d_lse = tl.where(tl.abs(d_lse) > 1e-20, d_lse, 1e-20)
    scaled = tl.where((scaled == scaled) & (no_gradient == 0), row_scale * d_lse, scaled)
    return scaled * number_at(logit_scale_ptr), d_lse, d_target


@triton.jit
def store_factors(
    tokens,
    finished,
    i,
    mask,
    hit,
    entry,  # (n,) E'_iy, before softcap's dz/du
    row_factor,  # (n,) c_i
):
    """The target's entry E'_iy, the row factors, and what the rounding of the entry took.

    The entry dominates its row, and its rounding dominates the error of the gradients. In grad_linear_weight the row's
    factor makes up for it: E'_iy becomes exact. The other entries belong to other classes; together they move by less
    than 2^-8. In grad_input those moves would add up, along what linear_weight's rows share. So grad_input keeps the
    plain factor, and the residual is added by itself.

    Where the row factor is inf (a normalizer of 0), the entry is inf - inf: nan, and so is every sum over it.
    """
    entry = tl.where(tl.abs(row_factor) == float("inf"), float("nan"), entry)
    if tokens.target_dz_du is not None:
        entry *= tl.load(tokens.target_dz_du + i, mask=mask, other=0.0)
    rounded = entry.to(finished.entry.dtype.element_ty)
    tl.store(finished.entry + i, rounded, mask=mask)
    rounded = rounded.to(tl.float32)
    correction = tl.where(hit & (tl.abs(rounded) > 0.0), entry / rounded, 1.0)  # 1 for nan, too
    tl.store(finished.row_factor + i, row_factor, mask=mask)
    tl.store(finished.weight_factor + i, row_factor * correction, mask=mask)
    tl.store(finished.residual + i, row_factor * (entry - rounded), mask=mask)


@Kernel
@triton.jit
def finish_rows_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    finished,  # FinishedRows, out
    n,
    loss,  # RowLoss
    logit_scale_ptr,  # ()
    BLOCK_N: tl.constexpr,
):
    """Losses, and the two numbers a row that turn E into the gradient of the logits.

    With l = g d_lse and a = g d_target (g the row scale; row_loss.py), p = E / Z and without label smoothing

        G_ij = (l p_ij + a [j = y]) dz/du = c E'_ij          c = l logit_scale / Z
                                                             E'_iy = (E_iy + Z a / l) dz/du_y,  E' = E elsewhere

    so the row factor goes to the (n, D) sides of the two GEMMs and E is not read again.
    """
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < kept_rows(tokens.kept, n)
    row_sum, at_target, reference_logit, target_logit, hit = sums_of_rows(tokens, sums, i, mask)
    log2_sum = tl.log2(row_sum)
    scaled_d_lse, d_lse, d_target = store_losses(
        tokens,
        sums,
        i,
        n,
        mask,
        (reference_logit - target_logit) + log2_sum,
        reference_logit + log2_sum,
        loss,
        logit_scale_ptr,
    )
    entry = at_target + row_sum * d_target / d_lse
    store_factors(tokens, finished, i, mask, hit, entry, scaled_d_lse / row_sum)


def launch_finish_rows(
    tokens: Tokens,
    sums: RowSums,
    loss: RowLoss,
    dtype: torch.dtype,  # of E
    *,
    logit_scale: Tensor | None,  # ()
) -> FinishedRows:
    finished, n = empty_rows(tokens, dtype), tokens.column.shape[0]
    finish_rows_kernel[(triton.cdiv(n, BLOCK_N),)](
        tokens, sums, finished, n, loss, logit_scale, BLOCK_N=BLOCK_N, num_warps=2
    )
    return finished
