"""From the losses of tokens to a scalar loss: which tokens count, what divides the sum of their losses, and the
gradients.

    mean = sum_i token_weight_i loss_i / denominator       denominator: tokens not ignored, or their class weights,
                                                           or the normalizer

Everything here is ordinary differentiable ATen over N numbers.

Tokens whose loss is multiplied by 0 are treated as ignored. They still count in the denominators and in token_accuracy,
which depend on the target alone. There are three cases in which they are not treated as ignored: token_weight gets a
gradient, which is made of their losses; metrics are wanted; or the denominator is 0 or nan, so that no weight divided
by it is 0.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..support.torch_private import differentiated, functorch_is_active, plain_apply
from .options import accumulation_dtype, beside_topk

# N tokens, V vocabulary


def class_weight_of(target: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # (N,) or (N, K)
    """w_y. Out-of-range targets are clamped here, because the kernels refuse them later."""
    return weight.to(dtype)[target.long().clamp(0, weight.shape[0] - 1)]


def mean_denominator(
    reduction: str,
    normalizer: Tensor | None,
    valid: Tensor,  # (N,)
    dtype: torch.dtype,
    target: Tensor | None = None,  # (N,), read only with class weights
    weight: Tensor | None = None,  # (V,)
) -> Tensor | None:  # ()
    if normalizer is not None:
        return normalizer.to(dtype)
    if reduction == "sum":
        return None
    if weight is None:
        return valid.sum(dtype=dtype)  # exact up to 2^24 tokens
    return torch.where(valid, class_weight_of(target, weight, dtype), 0.0).sum()


def nan_for_nothing(denominator: Tensor) -> Tensor:  # () -> ()
    """Replaces a denominator of 0 by nan. F.cross_entropy's mean is nan if the targets' class weights add up to 0, and
    so are its gradients for valid tokens. With label smoothing the mean is nan, too, because F.cross_entropy divides
    the targets' term separately, and that is 0 / 0.
    """
    return torch.where(denominator == 0.0, torch.nan, denominator)


def row_factor(
    valid: Tensor | None,  # (N,); None if every token counts
    token_weight: Tensor | None,  # (N,), None for 1
    denominator: Tensor | None,  # ()
    dtype: torch.dtype | None = None,
) -> Tensor:  # (N,)
    """The derivative of the scalar loss by each token's loss: inf or nan if the denominator is 0, but 0 for ignored
    tokens.
    """
    if token_weight is None:
        slope = 1.0 if denominator is None else denominator.reciprocal()
        return torch.where(valid, slope, 0.0).to(dtype)
    if valid is not None:
        # The weight of an ignored token may be anything. Its gradient is 0, even if the denominator is 0.
        token_weight = torch.where(valid, token_weight, 0.0)
    if denominator is None:
        return token_weight
    return token_weight / (denominator if valid is None else torch.where(valid, denominator, 1.0))


class Reduction(NamedTuple):
    """How an operator reduces the losses of tokens to one number: loss = sum_i g_i loss_i, 0 <= i < N.

    Without row scales it is a mean: (sum_i loss_i) / denominator. The denominator is by default the number of valid
    tokens.
    """

    row_scale: Tensor | None  # (N,), g
    denominator: Tensor | None = None  # ()

    def scale_of_tokens(self, valid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:  # (N,) -> (N,), ()
        """Returns the row scales g, with 0 for ignored tokens, and the denominator of a mean."""
        if self.row_scale is not None:
            return torch.where(valid, self.row_scale.to(dtype), 0.0), None
        denominator = mean_denominator("mean", self.denominator, valid, dtype)
        return torch.where(valid, denominator.reciprocal(), 0.0).to(dtype), denominator


def weighted_sum(valid: Tensor | None, token_weight: Tensor | None, losses: Tensor) -> Tensor:  # (N,) each -> ()
    """The sum that is divided by the denominator, detached: `quotient` gives the result its gradient."""
    losses = losses.detach()  # 0 for ignored tokens
    return losses.sum() if token_weight is None else (row_factor(valid, token_weight.detach(), None) * losses).sum()


def quotient(loss: Tensor | None, total: Tensor, denominator: Tensor | None) -> Tensor:  # () each
    """total / denominator, with the gradient of `loss`. `loss` is the sum over tokens of each token's loss divided by
    the denominator; None if no gradient is wanted.

    `loss` has the same value unless the denominator is 0. Then total / 0 is nan only if the total is 0, but `loss` is
    nan if any token's own loss is 0.
    """
    if loss is None:
        return total if denominator is None else total / denominator
    return (Quotient.apply if functorch_is_active() else apply_quotient)(loss, total, denominator)


class Quotient(Function):
    """total / denominator, with the gradient of `loss`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loss: Tensor, total: Tensor, denominator: Tensor | None) -> Tensor:
        return total.clone() if denominator is None else total / denominator

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None

    @staticmethod
    # for tangents of token_weight or normalizer; forward mode by the operands is refused elsewhere
    def jvp(ctx, tangent: Tensor, *_) -> Tensor:
        return tangent.clone()


apply_quotient = plain_apply(Quotient)


def denominator_of(layout: Any, call: Any, problem: Any) -> Tensor | None:  # ()
    """The denominator, over the tokens of all ranks. `layout` is a OneRank or a Layout, `problem` a TokenLosses."""
    dtype, target = accumulation_dtype(problem.operands[0].dtype), problem.operands.target
    if call.normalizer is not None:
        return layout.number(call.normalizer).to(dtype)
    weight = problem.denominator_weight
    denominator = mean_denominator(call.reduction, None, problem.valid, dtype, target, weight)
    if denominator is None:
        return None
    denominator = layout.sum_over_tokens(denominator)
    return denominator if weight is None else nan_for_nothing(denominator)


def weightless(token_weight: Tensor | None, factor: Tensor) -> Tensor | None:  # (N,) bool; None if none is marked
    """Tokens whose factor is 0. `factor` (N,) multiplies the losses: token_weight divided by the denominator."""
    if token_weight is None or differentiated(token_weight):
        return None
    return factor.detach() == 0.0


def without_weightless(layout: Any, problem: Any, token_weight: Tensor | None, factor: Tensor) -> Any:
    """`problem` with ignore_index as the target of tokens of weight 0. Targets out of range are kept, so that the
    operator refuses them.
    """
    out = None if any(problem.statistics) else weightless(token_weight, factor)
    if out is None:
        return problem
    target = problem.operands.target
    out = beside_topk(out, target)
    target = torch.where(out & (target >= 0) & (target < layout.num_classes), problem.ignore_index, target)
    return replace(problem, operands=problem.operands._replace(target=target))


def target_is_argmax(argmax: Tensor, target: Tensor, ignore_index: int) -> Tensor:  # (...), (...) -> (...) bool
    return (target != ignore_index) & (argmax == target)


def count_right_and_valid(is_right: Tensor, target: Tensor, ignore_index: int) -> Tensor:  # (...), (...) -> (2,) int64
    return torch.stack([is_right.sum(), (target != ignore_index).sum()])


def accuracy_of(counts: Tensor) -> Tensor:  # (2,) -> (); nan if no token is valid
    # a quotient of integers has the default dtype, which may be bfloat16 or float16
    right, valid = counts.to(torch.float32).unbind()
    return right / valid
