"""linear_cross_entropy: the bodies of flce::linear_cross_entropy and of flce::linear_cross_entropy_metrics.

The entry operators are CompositeImplicitAutograd, as ATen's scaled_dot_product_attention is. Their bodies see
requires_grad, autocast and tensor subclasses. What they do beyond the inner operators is differentiable ATen over N
numbers.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..distributed import vocab_parallel
from ..distributed.one_rank import any_dtensor
from ..math.options import Statistics, TokenLosses, TokenStatistics
from ..math.reduction import Reduction
from ..meta.arguments import WithGrad as Operator
from ..meta.checks import check_main_grad
from ..ops.call_facts import gradients_wanted
from ..ops.paths import gradients_in_the_same_pass
from .arguments import OP, check_arguments
from .class_order import check_class_order, in_class_order, in_order_of_ids
from .kl_div import loss_of_probabilities
from .loss import NONE_ASKED, NOTHING, WithGrad, layout_of_call, loss_of_tokens, losses_and_statistics, token_losses
from .metrics import accuracy_and_top1
from .positions import losses_of_positions
from .schemas import CrossEntropy, CrossEntropyMetrics

# N tokens, K classes of a target, D hidden, V vocabulary


def composite_metrics(call: CrossEntropyMetrics) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics. Results that are not requested are (0,).

    Returns (loss, token_accuracy, is_top1, argmax, lse, entropy, log_sum_sq_probs, mean_logit). token_accuracy and
    is_top1 come with argmax.
    """
    loss, statistics = composite(call, call.statistics)
    accuracy = is_top1 = None
    if statistics.argmax is not None:
        accuracy, is_top1 = accuracy_and_top1(statistics.argmax, call.target, call.ignore_index)
    local = cast(Any, loss).to_local() if any_dtensor(loss) else loss
    return loss, *(local.new_zeros(0) if result is None else result for result in (accuracy, is_top1, *statistics))


def composite(call: CrossEntropy, asked: Statistics = NONE_ASKED) -> tuple[Tensor, TokenStatistics]:
    """Body of torch.ops.flce.linear_cross_entropy, which returns the first of the two results."""
    if call.gradient_class_order is not None:
        check_class_order(OP, call)
    layout = layout_of_call(OP, call)
    if call.linear_weight.dim() > 2:
        return losses_of_positions(call, asked, composite)
    if call.target.is_floating_point():
        return loss_of_probabilities(call), TokenStatistics()
    check_arguments(call)
    order = None if layout.is_mesh or not call.sparse.gradient_threshold else call.gradient_class_order
    if order is not None:
        call = in_class_order(call)
    operands = layout.head(call)
    if call.main_grad is not None:
        check_main_grad(OP, operands, call.main_grad)
    target_weight = None if call.target_weight is None else layout.per_token(call.target_weight)
    problem = token_losses(OP, layout, call, operands, asked, target_weight=target_weight)
    with_grad: WithGrad | None = None
    if layout.splits_vocabulary:
        if call.reduction != "none" and vocab_parallel.one_pass_applies(layout, problem):
            with_grad = partial(vocab_parallel.losses_with_grad, layout)
    elif call.reduction != "none" and torch.is_grad_enabled():
        sparse = call.sparse.gradient_threshold != 0.0
        if gradients_in_the_same_pass(problem, main_grad=call.main_grad is not None, sparse=sparse):
            with_grad = losses_with_grad
    loss, found = loss_of_tokens(layout, call, problem, partial(losses_and_statistics, layout), with_grad)
    statistics = TokenStatistics._make(found)
    return loss, statistics if order is None else in_order_of_ids(statistics, cast(Tensor, call.gradient_class_order))


def losses_with_grad(problem: TokenLosses, reduction: Reduction) -> tuple[Tensor, Tensor, TokenStatistics]:
    """Returns the loss () with its gradients, the losses of tokens (N,), and the statistics."""
    values = Operator.like(problem, reduction=reduction, output_mask=gradients_wanted(problem.operands))
    loss, losses, _, _, _, *found, _, _ = Operator.applied(values)
    return loss, losses, TokenStatistics.found(problem.statistics, found) if any(problem.statistics) else NOTHING
