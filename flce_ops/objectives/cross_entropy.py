"""Cross-entropy of one class, or of K classes, a token.

With z the row of logits (scaled and capped), w the class weights, eps the label smoothing and V classes:

    loss = (1 - eps) w_y (lse - z_y)  -  eps / V sum_j w_j (z_j - lse)  +  z_loss lse^2

Both terms are differences from lse, so an offset that all logits share costs them no digits. `logit_sum` is the second
sum, sum_j w_j (z_j - lse).

A soft target has K classes y_k with weights q_k, and sum_k q_k w_yk (lse - z_yk) in place of w_y (lse - z_y). The terms
of equal classes are added.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.options import LARGEST, LogitNumbers, OptionalScalar, Ranges, Scalar, TokenLosses, numbers_of, scalar_unless
from ..math.reduction import class_weight_of
from ..math.statistics import Rows, surprisal
from .row import RowFunction, RowObjective, constant, number, times

# N tokens, K classes of each, V vocabulary


class LossNumbers(NamedTuple):
    """The user's numbers, in the order of the entry operators' schemas. They include LogitNumbers."""

    label_smoothing: Scalar = 0.0
    softcap: OptionalScalar = None
    logit_scale: Scalar = 1.0
    temperature: Scalar = 1.0
    z_loss: Scalar = 0.0


RANGES: Ranges = {
    "label_smoothing": ("expected label_smoothing in [0, 1]", 0.0, 1.0),
    "z_loss": ("expected z_loss to be finite", -LARGEST, LARGEST),
}


class LossOptions(NamedTuple):
    """The numbers of the loss as the inner operators take them."""

    label_smoothing: float = 0.0
    z_loss: Tensor | None = None  # ()


NUMBERS = numbers_of(LossOptions)


def loss_options(numbers: LossNumbers | LogitNumbers, like: Tensor) -> LossOptions:
    """A number at its default, as all of LogitNumbers are, becomes None, which leaves out its term of the loss."""
    options: list[Any] = []
    for name in LossOptions._fields:
        default = LossNumbers._field_defaults[name]
        value = getattr(numbers, name, default)
        options.append(scalar_unless(default, value, like, name) if name in NUMBERS else value)
    return LossOptions(*options)


class CrossEntropy(RowObjective):
    @RowFunction
    def of_target(surprisal, weight, at, loss):
        factor = 1.0 - loss.options.label_smoothing
        if weight is not None:
            factor = factor * weight
        return times(factor, surprisal), factor

    @RowFunction
    def of_row(value, slope, lse, logit_sum, at, loss):
        d_lse = slope
        if logit_sum is not None:
            smoothing = loss.options.label_smoothing / loss.num_classes
            of_all = loss.options.label_smoothing
            if loss.class_weight_sum is not None:
                of_all = smoothing * number(loss.class_weight_sum, 1.0)
            value = value + (of_all * (lse - constant(lse)) - smoothing * logit_sum)
            d_lse = d_lse + of_all
        if loss.options.z_loss is not None:
            z_loss = number(loss.options.z_loss, 0.0)
            value = value + z_loss * lse * lse
            d_lse = d_lse + 2.0 * z_loss * lse
        return value, d_lse

    @property
    def d_sum(self) -> float | None:
        smoothing = self.options.label_smoothing
        return -smoothing / self.num_classes if smoothing else None


def topk_weights(target: Tensor, target_weight: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:  # (N, K)
    """The weights q: 0 for ignored classes, whatever their weight is; nan if a weight is negative."""
    q = torch.where(target == ignore_index, 0.0, target_weight).to(dtype)
    return torch.where(q < 0.0, torch.nan, q)


def cross_entropy_of(
    target: Tensor,  # (N,) or (N, K)
    weight: Tensor | None,  # (V,)
    num_classes: int,
    options: LossOptions,
    dtype: torch.dtype,
    topk_weight: Tensor | None = None,  # (N, K)
) -> CrossEntropy:
    of_target, weight_sum = topk_weight, None
    if weight is not None:
        of_class, weight_sum = class_weight_of(target, weight, dtype), weight.to(dtype).sum()
        of_target = of_class if topk_weight is None else topk_weight * of_class
    return CrossEntropy(options, None, of_target, num_classes, weight_sum)


def cross_entropy_of_call(
    call: Any,  # a WithGrad of meta/arguments.py, or TokenLosses
    operands: Any,
    num_classes: int,  # V, over all shards
    dtype: torch.dtype,
) -> CrossEntropy:
    target, topk_weight = operands.target, call.target_weight
    if topk_weight is not None:
        topk_weight = topk_weights(target, topk_weight, call.ignore_index, dtype)
    return cross_entropy_of(target, operands.weight, num_classes, call.loss, dtype, topk_weight)


def losses_of_rows(problem: TokenLosses, num_classes: int, rows: Rows) -> Tensor:  # (N,)
    """Losses that autograd differentiates; 0 for ignored tokens. num_classes is V, over all shards."""
    objective = cross_entropy_of_call(problem, problem.operands, num_classes, rows.lse_pair.dtype)
    distance = surprisal(rows.target_logit, rows.lse_pair)
    logit_sum = rows.logit_sum if problem.loss.label_smoothing else None
    losses, _ = objective.losses_and_slopes(distance, rows.lse, logit_sum)
    return torch.where(problem.valid, losses, 0.0)
