"""The loss of one token as a function of a few numbers per row of logits, and its partial derivatives.

With z the row of logits (scaled and capped), w the class weights, eps the label smoothing and V classes:

    lse         = logsumexp_j z_j
    target_logit = z_y
    logit_sum   = sum_j w_j z_j                                   (only read when eps > 0)

    loss = (1 - eps) w_y (lse - z_y)  +  eps / V (sum_j w_j lse - logit_sum)  +  z_loss lse^2

so that every gradient with respect to z is  d_lse * softmax(z) + d_target * onehot(y) + d_sum * w.
A soft target has K slots, classes y_k of weights q_k, and the sum of q_k w_yk (lse - z_yk) in place of w_y (lse - z_y);
its numbers by slot are (N, K), and equal classes add up.
Times the row's scale these three are l, a and m of DESIGN.md.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce_ops.math.options import Cotangents, LogitOperands, LossOptions, Operands
from flce_ops.math.slots import beside_slots, tokens_that_count


def class_weight_of(target: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # (N,) or (N, K)
    """w_y. Out-of-range targets are clamped here; the kernels refuse them."""
    return weight.to(dtype)[target.long().clamp(0, weight.shape[0] - 1)]


def surprisal(target_logit: Tensor, lse: Tensor, lse_rest: Tensor | None) -> Tensor:  # (N,) or (N, K), as target_logit
    """lse - target_logit = -log p of the target. `lse_rest` is what the rounding of lse took from it.

    The target is among the classes of a whole row, so below 0 stands a rounding of target_logit.
    """
    distance = beside_slots(lse, target_logit) - target_logit
    if lse_rest is None:
        return distance
    distance = distance + beside_slots(lse_rest, target_logit)
    return distance - distance.detach().clamp(max=0.0)


def times(factor: Tensor | float, values: Tensor) -> Tensor:
    """factor * values, nothing where the factor is the number 1: an operation on few numbers is all overhead."""
    return values if isinstance(factor, float) and factor == 1.0 else factor * values


@dataclass(frozen=True)
class LossTerms:
    """The factors of the three terms above. Tensors have shape (N,) or () and the accumulation dtype."""

    target_factor: Tensor | float  # (1 - eps) w_y; of a soft target (N, K), (1 - eps) q_k w_yk
    smoothing: float | Tensor  # eps / V
    smoothing_lse_factor: Tensor | float  # eps / V * sum_j w_j
    z_loss: Tensor | None  # ()

    @property
    def of_slots(self) -> Tensor | None:
        """target_factor where it is (N, K)."""
        factor = self.target_factor
        return factor if isinstance(factor, Tensor) and factor.dim() == 2 else None

    def of(self, rows: slice) -> "LossTerms":
        factor = self.target_factor
        return replace(self, target_factor=factor[rows]) if isinstance(factor, Tensor) else self

    def loss(
        self, target_logit: Tensor, lse: Tensor, logit_sum: Tensor | None, lse_rest: Tensor | None = None
    ) -> Tensor:
        """`lse_rest` is what the rounding of lse took from it."""
        loss = times(self.target_factor, surprisal(target_logit, lse, lse_rest))
        if self.of_slots is not None:  # a class of weight 0 may be switched off by a bias of -inf
            loss = torch.where((self.of_slots == 0.0) & loss.isnan(), 0.0, loss).sum(-1)
        if logit_sum is not None:
            loss = loss + (self.smoothing_lse_factor * lse - self.smoothing * logit_sum)
        if self.z_loss is not None:
            loss = loss + self.z_loss * lse * lse
        return loss

    def cotangents(self, target_logit: Tensor, lse: Tensor, scale: Tensor) -> Cotangents:  # (N,) each
        """Derivatives of sum_i scale_i loss_i by the numbers of a row; None by logit_sum where the loss has none."""
        d_lse = self.smoothing_lse_factor + (self.target_factor if self.of_slots is None else self.of_slots.sum(-1))
        if self.z_loss is not None:
            d_lse = d_lse + 2.0 * self.z_loss * lse
        by_slot = beside_slots(scale, target_logit)
        unweighted = isinstance(self.target_factor, float) and self.target_factor == 1.0
        d_target = by_slot.neg() if unweighted else -self.target_factor * by_slot
        return Cotangents(d_target, times(d_lse, scale), -self.smoothing * scale if self.smoothing else None)


def losses_of_rows(
    operands: Operands | LogitOperands,
    ignore_index: int,
    options: LossOptions,
    num_classes: int,  # V, of all shards
    target_logit: Tensor,  # (N,), as the next two; (N, K) of a soft target
    lse: Tensor,
    logit_sum: Tensor | None,  # read only with label smoothing
    lse_rest: Tensor | None = None,  # (N,)
    target_weight: Tensor | None = None,  # (N, K)
) -> tuple[LossTerms, Tensor, Tensor]:
    """The terms of N tokens; losses (N,), 0 where ignored; which tokens are not."""
    target = operands.target
    slot_weight = None if target_weight is None else weight_of_slots(target, target_weight, ignore_index, lse.dtype)
    terms = terms_of_tokens(target, operands.weight, num_classes, options, lse.dtype, slot_weight)
    losses = terms.loss(target_logit, lse, logit_sum if options.label_smoothing else None, lse_rest)
    valid = tokens_that_count(target, ignore_index)
    return terms, torch.where(valid, losses, 0.0), valid


def weight_of_slots(target: Tensor, target_weight: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:  # (N, K)
    """q, 0 in slots that do not count, whatever stands there; nan for what is negative."""
    q = torch.where(target == ignore_index, 0.0, target_weight).to(dtype)
    return torch.where(q < 0.0, torch.nan, q)


def terms_of_tokens(
    target: Tensor,  # (N,) or (N, K)
    weight: Tensor | None,  # (V,)
    num_classes: int,
    options: LossOptions,
    dtype: torch.dtype,
    slot_weight: Tensor | None = None,  # (N, K)
) -> LossTerms:
    target_weight, weight_sum = slot_weight, None
    if weight is not None:
        of_class, weight_sum = class_weight_of(target, weight, dtype), weight.to(dtype).sum()
        target_weight = of_class if slot_weight is None else slot_weight * of_class
    return loss_terms(target_weight, weight_sum, num_classes, options)


def loss_terms(
    target_weight: Tensor | None,  # (N,) class weight of each target, None for 1; of a soft one (N, K), q_k times it
    weight_sum: Tensor | None,  # () sum of the class weights, None for V
    num_classes: int,
    options: LossOptions,
) -> LossTerms:
    label_smoothing = options.label_smoothing
    keep = 1.0 - label_smoothing
    smoothing = label_smoothing / num_classes if label_smoothing else 0.0
    if not label_smoothing:
        smoothing_lse_factor: Tensor | float = 0.0
    else:
        smoothing_lse_factor = label_smoothing if weight_sum is None else smoothing * weight_sum
    return LossTerms(
        target_factor=keep if target_weight is None else keep * target_weight,
        smoothing=smoothing,
        smoothing_lse_factor=smoothing_lse_factor,
        z_loss=options.z_loss,
    )
