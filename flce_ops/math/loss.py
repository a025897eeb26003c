"""The loss of one token as a function of a few numbers per row of logits, and its partial derivatives.

With z the row of logits (scaled and capped), w the class weights, eps the label smoothing and V classes:

    lse         = logsumexp_j z_j
    target_logit = z_y
    logit_sum   = sum_j w_j z_j                                   (only read when eps > 0)

    loss = (1 - eps) w_y (lse - z_y)  +  eps / V (sum_j w_j lse - logit_sum)  +  z_loss lse^2

so that every gradient with respect to z is  d_lse * softmax(z) + d_target * onehot(y) + d_sum * w.
Times the row's scale these three are l, a and m of DESIGN.md.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce_ops.math.options import Cotangents, LogitOperands, LossOptions, Operands


def class_weight_of(target: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # (N,)
    """w_y. Out-of-range targets are clamped here; the kernels refuse them."""
    return weight.to(dtype)[target.long().clamp(0, weight.shape[0] - 1)]


def surprisal(target_logit: Tensor, lse: Tensor, lse_rest: Tensor | None) -> Tensor:  # (N,)
    """lse - target_logit = -log p of the target. `lse_rest` is what the rounding of lse took from it.

    The target is among the classes of a whole row, so below 0 stands a rounding of target_logit.
    """
    distance = lse - target_logit
    if lse_rest is None:
        return distance
    distance = distance + lse_rest
    return distance - distance.detach().clamp(max=0.0)


def times(factor: Tensor | float, values: Tensor) -> Tensor:
    """factor * values, nothing where the factor is the number 1: an operation on few numbers is all overhead."""
    return values if isinstance(factor, float) and factor == 1.0 else factor * values


@dataclass(frozen=True)
class LossTerms:
    """The factors of the three terms above. Tensors have shape (N,) or () and the accumulation dtype."""

    target_factor: Tensor | float  # (1 - eps) w_y
    smoothing: float | Tensor  # eps / V
    smoothing_lse_factor: Tensor | float  # eps / V * sum_j w_j
    z_loss: Tensor | None  # ()

    def of(self, rows: slice) -> "LossTerms":
        factor = self.target_factor
        return replace(self, target_factor=factor[rows]) if isinstance(factor, Tensor) else self

    def loss(
        self, target_logit: Tensor, lse: Tensor, logit_sum: Tensor | None, lse_rest: Tensor | None = None
    ) -> Tensor:
        """`lse_rest` is what the rounding of lse took from it."""
        loss = times(self.target_factor, surprisal(target_logit, lse, lse_rest))
        if logit_sum is not None:
            loss = loss + (self.smoothing_lse_factor * lse - self.smoothing * logit_sum)
        if self.z_loss is not None:
            loss = loss + self.z_loss * lse * lse
        return loss

    def derivatives(
        self, target_logit: Tensor, lse: Tensor
    ) -> tuple[Tensor | float, Tensor | float, Tensor | float | None]:
        """By target_logit, lse and logit_sum; None where the loss does not read that."""
        d_lse = self.target_factor + self.smoothing_lse_factor
        if self.z_loss is not None:
            d_lse = d_lse + 2.0 * self.z_loss * lse
        return -self.target_factor, d_lse, -self.smoothing if self.smoothing else None

    def cotangents(self, target_logit: Tensor, lse: Tensor, scale: Tensor) -> Cotangents:  # (N,) each
        """Of the numbers of a row in sum_i scale_i loss_i."""
        d_target, d_lse, d_sum = self.derivatives(target_logit, lse)
        by_target = scale.neg() if isinstance(d_target, float) and d_target == -1.0 else d_target * scale
        return Cotangents(by_target, times(d_lse, scale), None if d_sum is None else d_sum * scale)


def losses_of_rows(
    operands: Operands | LogitOperands,
    ignore_index: int,
    options: LossOptions,
    num_classes: int,  # V, of all shards
    target_logit: Tensor,  # (N,), as the next two
    lse: Tensor,
    logit_sum: Tensor | None,  # read only with label smoothing
    lse_rest: Tensor | None = None,  # (N,)
) -> tuple[LossTerms, Tensor, Tensor]:
    """The terms of N tokens; losses (N,), 0 where ignored; which tokens are not."""
    terms = terms_of_tokens(operands.target, operands.weight, num_classes, options, lse.dtype)
    losses = terms.loss(target_logit, lse, logit_sum if options.label_smoothing else None, lse_rest)
    valid = operands.target != ignore_index
    return terms, torch.where(valid, losses, 0.0), valid


def terms_of_tokens(
    target: Tensor,  # (N,)
    weight: Tensor | None,  # (V,)
    num_classes: int,
    options: LossOptions,
    dtype: torch.dtype,
) -> LossTerms:
    if weight is None:
        return loss_terms(None, None, num_classes, options)
    return loss_terms(class_weight_of(target, weight, dtype), weight.to(dtype).sum(), num_classes, options)


def loss_terms(
    target_weight: Tensor | None,  # (N,) class weight of each target, None for 1
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
