"""A row objective: the loss of a token from its row of logits, and its derivatives (slopes) by the numbers of the row.

    surprisal_i = lse_i - z_iy                 a soft target has K of them, one for each class
                value_ik, slope_ik = of_target(surprisal_ik, weight_ik, at, objective)
    loss_i, d_lse_i = of_row(sum_k value_ik, sum_k slope_ik, lse_i, logit_sum_i, at, objective)

    G_ij = (l_i p_ij + a_i [j = y_i] + m_i w_j) dz/du        l = g d_lse,   a = -g slope,   m = g d_sum

logit_sum_i is sum_j w_j (z_ij - lse_i), in which lse_i counts as a constant: its derivative by z_ij is w_j.
`slope` is the derivative of the value by the surprisal. d_lse is the derivative of the loss by lse through all terms. g
is the scale of the row. of_target is linear in `weight`. `weight` is the class weight of the target; with soft targets,
multiplied by the class's weight q_k for the token.

An objective is a class with two RowFunctions. ATen calls them on tensors, and Triton kernels on a block
of rows. Their inputs are the fields of RowNumbers. A RowFunction is written once, in the words that this file defines
for tensors and in_triton.py for kernels:

@RowFunction
def of_target(surprisal, ...):      of_target(...)     on tensors
    return weight * ..., ...        of_target.jit      the same source with the words of a kernel, for Triton

Cross-entropy of one class, or of K classes, a token.

With z the row of logits (scaled and capped), w the class weights, eps the label smoothing and V classes:

    loss = (1 - eps) w_y (lse - z_y)  -  eps / V sum_j w_j (z_j - lse)  +  z_loss lse^2

Both terms are differences from lse, so an offset that all logits share costs them no digits. `logit_sum` is the second
sum, sum_j w_j (z_j - lse).

A soft target has K classes y_k with weights q_k, and sum_k q_k w_yk (lse - z_yk) in place of w_y (lse - z_y). The terms
of equal classes are added.
"""

import types
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..math.options import (
    LARGEST,
    Cotangents,
    LogitNumbers,
    OptionalScalar,
    Ranges,
    Scalar,
    TokenLosses,
    numbers_of,
    scalar_unless,
)
from ..math.statistics import Rows, surprisal
from ..math.token_weights_and_denominator import class_weight_of

# N tokens, K classes of each


log, where = torch.log, torch.where


def constant(values: Tensor) -> Tensor:
    """The values without a derivative."""
    return values.detach()


def number(value: Tensor | None, otherwise: float) -> Tensor | float:
    """The number of an option, which a kernel reads from memory."""
    return otherwise if value is None else value


def of_tokens(values: Tensor, at: Any) -> Tensor:
    """A number for each token. A kernel reads it at its tokens, `at`."""
    return values


WORDS = ("where", "constant", "number", "of_tokens")


class RowFunction:
    words: ClassVar[dict[str, str]] = {word: word for word in WORDS}  # words and their names in in_triton.py

    def __init__(self, source: Any) -> None:
        self.source = source
        self._jit: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.source(*args)

    @property
    def jit(self) -> Any:
        if self._jit is None:  # not before the first use: only code that runs kernels imports Triton
            import triton

            from . import in_triton

            source = self.source
            words = {word: getattr(in_triton, name) for word, name in (("tl", "tl"), *self.words.items())}
            function = types.FunctionType(source.__code__, {**source.__globals__, **words}, source.__name__)
            function.__module__, function.__qualname__ = source.__module__, source.__qualname__
            self._jit = triton.jit(function)
        return self._jit


class RowNumbers(NamedTuple):
    """The inputs of an objective. In a kernel the tensors are pointers."""

    options: Any = None  # a NamedTuple of 0-d numbers and names
    tokens: Any = None  # a NamedTuple of tensors (N,) or None
    weight: Tensor | None = None  # (N,) or (N, K); None for 1
    num_classes: int = 0  # V, over all ranks
    class_weight_sum: Tensor | None = None  # () sum_j w_j; None for V


Self = TypeVar("Self", bound="RowObjective")
Slope = Any  # (N,), or (N, K) for a target (N, K); one number if it is equal for all tokens


class RowObjective(RowNumbers):
    bounded: ClassVar[bool] = False  # if the slope is 0, the gradient is 0, even if the loss is divided by 0
    by_row: ClassVar[bool] = False  # in a kernel: the tensors are by rows of a chunk, not by tokens
    of_target: ClassVar[RowFunction]

    @RowFunction
    def of_row(value, slope, lse, logit_sum, at, objective):
        return value, slope

    @property
    def d_sum(self) -> float | None:
        """The derivative by the weighted sum of the logits, which is the same for all rows; None if the sum is not
        read.
        """
        return None

    @property
    def soft(self) -> bool:
        """Whether tokens have K classes."""
        return self.weight is not None and self.weight.dim() == 2

    def of(self: Self, rows: slice) -> Self:
        """The objective of some tokens."""
        return self if self.weight is None else self._replace(weight=self.weight[rows])

    def losses_and_slopes(
        self,
        surprisal: Tensor,  # (N,) or (N, K)
        lse: Tensor,  # (N,)
        logit_sum: Tensor | None,  # (N,), with label smoothing
    ) -> tuple[Tensor, tuple[Slope, Slope]]:  # (N,)
        """In ATen: returns the losses, and their slopes by the target's logit and by lse. The losses and slopes are
        differentiable.
        """
        value, slope = surprisal, cast(Slope, 1.0)  # without an operation: a product with 1 would be a launch
        if self.weight is not None or self.options.label_smoothing:
            value, slope = self.of_target.source(surprisal, self.weight, None, self)
        of_all_targets = slope
        if self.soft:
            # a bias of -inf may switch the class off
            value = torch.where((slope == 0.0) & value.isnan(), 0.0, value).sum(-1)
            of_all_targets = slope.sum(-1)
        losses, d_lse = self.of_row.source(value, of_all_targets, lse, logit_sum, None, self)
        return losses, (-slope, d_lse)

    def cotangents(self, slopes: tuple[Slope, Slope], scale: Tensor) -> Cotangents:  # (N,) each
        """The cotangents of the row numbers for the scalar sum_i scale_i loss_i."""
        of_targets, d_sum = scale.unsqueeze(-1) if self.soft else scale, self.d_sum
        d_target, d_lse = slopes[0] * of_targets, slopes[1] * scale
        if self.bounded:
            d_target, d_lse = (torch.where(slope == 0.0, 0.0, of) for slope, of in zip(slopes, (d_target, d_lse)))
        return Cotangents(d_target, d_lse, None if d_sum is None else d_sum * scale)


class GivenSlopes(RowObjective):
    """`tokens` is a Cotangents, where None stands for 0. The value is not a loss, and nothing reads it."""

    @RowFunction
    def of_target(surprisal, weight, at, given):
        slope = where(surprisal < 0.0, 0.0, 0.0)
        if given.tokens.grad_target_logit is not None:
            slope = -of_tokens(given.tokens.grad_target_logit, at)
        return slope, slope

    @RowFunction
    def of_row(value, slope, lse, logit_sum, at, given):
        d_lse = where(lse < 0.0, 0.0, 0.0)
        if given.tokens.grad_lse is not None:
            d_lse = of_tokens(given.tokens.grad_lse, at)
        return value, d_lse


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
        return factor * surprisal, factor

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


def cross_entropy_of(
    call: Any,  # a WithGrad of meta/arguments.py, or TokenLosses
    num_classes: int,  # V, over all shards
    dtype: torch.dtype,
) -> CrossEntropy:
    target, weight, of_target, weight_sum = call.operands.target, call.operands.weight, call.target_weight, None
    if of_target is not None:  # q of soft targets: 0 for ignored classes, whatever it is; nan if negative
        q = torch.where(target == call.ignore_index, 0.0, of_target).to(dtype)
        of_target = torch.where(q < 0.0, torch.nan, q)
    if weight is not None:
        of_class, weight_sum = class_weight_of(target, weight, dtype), weight.to(dtype).sum()
        of_target = of_class if of_target is None else of_target * of_class
    return CrossEntropy(call.loss, None, of_target, num_classes, weight_sum)


def losses_of_rows(problem: TokenLosses, num_classes: int, rows: Rows) -> Tensor:  # (N,)
    """Losses that autograd differentiates; 0 for ignored tokens. num_classes is V, over all shards."""
    objective = cross_entropy_of(problem, num_classes, rows.lse_pair.dtype)
    distance = surprisal(rows.target_logit, rows.lse_pair)
    logit_sum = rows.logit_sum if problem.loss.label_smoothing else None
    losses, _ = objective.losses_and_slopes(distance, rows.lse, logit_sum)
    return torch.where(problem.valid, losses, 0.0)
