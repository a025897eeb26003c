"""linear_cross_entropy: the bodies of flce::linear_cross_entropy and of flce::linear_cross_entropy_metrics.

The entries are CompositeImplicitAutograd, as ATen's scaled_dot_product_attention: they see requires_grad, autocast and
tensor subclasses, and everything they do beyond the inner operators is ordinary differentiable ATen over N numbers.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from flce_ops.distributed.one_rank import OneRank
from flce_ops.entry.arguments import OP, check_arguments, check_main_grad, check_sparse_gradient
from flce_ops.entry.class_order import check_class_order, in_class_order, in_order_of_ids
from flce_ops.entry.class_probabilities import loss_of_probabilities
from flce_ops.entry.loss import WithGrad, layout_of_call, loss_of_tokens, token_losses
from flce_ops.entry.metrics import accuracy_and_top1
from flce_ops.entry.positions import losses_of_positions
from flce_ops.entry.refusals import refuse
from flce_ops.entry.rows import cross_entropy_of_rows, from_rows
from flce_ops.entry.schemas import CrossEntropy, CrossEntropyMetrics
from flce_ops.math.options import Operands, Statistics, TokenLosses, TokenStatistics
from flce_ops.math.reduction import Reduction
from flce_ops.meta.call import takes
from flce_ops.meta.main_grad import check_main_grad as check_buffer
from flce_ops.ops.autocast import autocast_head
from flce_ops.ops.paths import gradients_in_the_same_pass
from flce_ops.ops.situations import needs_gradient, options_in_situation
from flce_ops.support.dtensor import any_dtensor

# N tokens, K slots of a target, D hidden, V vocabulary


@takes(CrossEntropy)
def composite(call: CrossEntropy) -> Tensor:
    """Body of torch.ops.flce.linear_cross_entropy."""
    return loss_and_statistics(call, Statistics())[0]


@takes(CrossEntropyMetrics)
def composite_metrics(call: CrossEntropyMetrics) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics; (0,) in place of what is not asked for.

    (loss, token_accuracy, is_top1, argmax, lse, entropy, log_sum_sq_probs, mean_logit), the first two with argmax.
    """
    loss, statistics = loss_and_statistics(call, call.statistics)
    accuracy = is_top1 = None
    if statistics.argmax is not None:
        accuracy, is_top1 = accuracy_and_top1(statistics.argmax, call.target, call.ignore_index)
    local = cast(Any, loss).to_local() if any_dtensor(loss) else loss
    return loss, *(local.new_zeros(0) if result is None else result for result in (accuracy, is_top1, *statistics))


def loss_and_statistics(call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    check_main_grad(OP, call)
    check_class_order(OP, call)
    if call.linear_weight.dim() > 2:
        refuse(OP, call)
        return losses_of_positions(call, asked, of_matrix)
    return of_matrix(call, asked)


def of_matrix(call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    """Of a linear_weight (V, D)."""
    layout = layout_of_call(OP, call)
    if call.target.is_floating_point():
        return loss_of_probabilities(call), TokenStatistics()
    autocast_head(call)
    check_arguments(call)
    check_buffer(OP, Operands(call.input, call.linear_weight, call.target, call.linear_bias), call.main_grad)
    call.sparse = layout.sparse(call.sparse)
    check_sparse_gradient(OP, call)
    if call.gradient_class_order is None or not call.sparse.gradient_threshold or layout.is_mesh:
        return of_classes_in_order(layout, call, asked)
    ordered = in_class_order(call)
    loss, statistics = of_classes_in_order(layout, ordered, asked)
    return loss, in_order_of_ids(statistics, ordered.gradient_class_order)


def of_classes_in_order(layout: OneRank, call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    problem = token_losses(call, layout.head(call), asked)
    target_weight = layout.per_token(call.target_weight)
    problem = problem._replace(main_grad=call.main_grad, target_weight=target_weight, sparse=call.sparse)
    if call.reduction == "none":
        with_grad = None
    else:
        with_grad = one_pass_over_shards(layout, problem) if layout.splits_vocabulary else one_pass_of(problem)
    if layout.splits_vocabulary and with_grad is None:
        refuse(OP, call, "recomputing shards")
    loss, found = loss_of_tokens(layout, call, problem, from_rows(layout, cross_entropy_of_rows), with_grad)
    return loss, TokenStatistics(*found)


def one_pass_of(problem: TokenLosses) -> WithGrad | None:
    """None where backward makes the gradients, or nothing does."""
    input, linear_weight, _, linear_bias, _ = problem.operands
    known = options_in_situation(problem.loss, problem.logits)
    known |= {"main_grad": problem.main_grad is not None, "sparse": problem.sparse.gradient_threshold != 0.0}
    return losses_with_grad if gradients_in_the_same_pass(input, linear_weight, linear_bias, **known) else None


def one_pass_over_shards(layout: Any, problem: TokenLosses) -> WithGrad | None:
    from flce_ops.distributed import one_pass

    return partial(one_pass.loss, layout) if one_pass.applies(layout, problem) else None


def losses_with_grad(problem: TokenLosses, reduction: Reduction) -> tuple[Tensor, Tensor, TokenStatistics]:
    """() with its gradients, and the losses of tokens (N,)."""
    input, linear_weight, _, linear_bias, _ = problem.operands
    mask = [needs_gradient(input), needs_gradient(linear_weight), needs_gradient(linear_bias)]
    asked, options = problem.statistics, problem.options | problem.sparse._asdict()
    loss, losses, _, _, _, *found = torch.ops.flce.linear_cross_entropy_with_grad(
        *problem.operands,
        *reduction,
        **options,
        output_mask=mask,
        **asked._asdict(),
        target_weight=problem.target_weight,
    )
    return loss, losses, TokenStatistics.found(asked, found)
