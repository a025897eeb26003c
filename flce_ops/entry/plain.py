"""The loss of plain tensors: picks the path, flattens the tokens, reduces over N numbers.

loss_of_tokens -> ..._with_grad                                   a training step's loss, divided by the operator
               -> weighted_loss -> ..._with_grad | ..._forward    another scalar loss, reduced in ATen
               -> weighted_losses -> ..._forward                  reduction="none"
"""

import math
from typing import Any

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_arguments
from flce_ops.entry.class_order import check_class_order, in_class_order, in_order_of_ids
from flce_ops.entry.schemas import CrossEntropy, LogitsCrossEntropy, PolicyLoss
from flce_ops.entry.sparse_gradient import check_sparse_gradient
from flce_ops.entry.weighted import FromForward, WithGrad, weighted_loss, weighted_losses
from flce_ops.math.options import LogitOperands, Operands, Statistics, TokenLosses, TokenStatistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction, denominator_of_all, quotient
from flce_ops.math.scalars import logit_options, scalar
from flce_ops.math.statistics import asked_of_forward, statistics_of_forward
from flce_ops.objectives.cross_entropy import loss_options, losses_of_rows
from flce_ops.ops.autocast import autocast_head
from flce_ops.ops.paths import gradients_in_the_same_pass
from flce_ops.ops.situations import needs_gradient, options_in_situation
from flce_ops.support.differentiated import differentiated

# N tokens, K slots of a target, D hidden, V vocabulary

OP = "linear_cross_entropy"


def loss_and_statistics(call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    autocast_head(call)
    check_arguments(call)
    check_sparse_gradient(OP, call)
    check_class_order(OP, call)
    if call.gradient_class_order is not None and call.sparse.gradient_threshold:
        call = in_class_order(call)
        loss, statistics = of_classes_in_order(call, asked)
        return loss, in_order_of_ids(statistics, call.gradient_class_order)
    return of_classes_in_order(call, asked)


def of_classes_in_order(call: CrossEntropy, asked: Statistics) -> tuple[Tensor, TokenStatistics]:
    *shape, hidden = call.input.shape
    tokens = math.prod(shape)  # -1 has no answer in a vmap over nothing
    target, target_weight = (
        None if by_slot is None else by_slot.reshape(tokens, *by_slot.shape[len(shape) :])
        for by_slot in (call.target, call.target_weight)
    )
    # as it is where it can be: a view would be a node of the graph
    input = call.input if len(shape) == 1 else call.input.reshape(tokens, hidden)
    problem = token_losses(call, Operands(input, call.linear_weight, target, call.linear_bias, call.weight), asked)
    problem = problem._replace(main_grad=call.main_grad, target_weight=target_weight, sparse=call.sparse)
    with_grad = None if call.reduction == "none" else one_pass_of(problem)
    loss, statistics = loss_of_tokens(call, problem, losses_from_forward, with_grad)
    statistics = statistics.changed(lambda of_tokens: of_tokens.reshape(shape))
    return loss.reshape(shape) if call.reduction == "none" else loss, statistics


def loss_of_tokens(
    call: CrossEntropy | LogitsCrossEntropy | PolicyLoss,
    problem: TokenLosses,
    from_forward: FromForward,
    with_grad: WithGrad | None,  # None where backward makes the gradients, or nothing does
) -> tuple[Tensor, Any]:
    """The loss, () or (N,), and what else is asked for."""
    if with_grad is not None and token_factors_are_equal(call):
        loss, _, besides = with_grad(problem, reduction_in_operator(call, problem))
        return loss, besides
    valid, token_weight = problem.valid, call.token_weight
    if token_weight is not None:
        token_weight = token_weight.reshape(valid.shape[0]).to(accumulation_dtype(problem.operands[0].dtype))
    if call.reduction == "none":
        return weighted_losses(problem, valid, token_weight, from_forward)
    denominator = denominator_of(call, problem)
    loss, total, besides = weighted_loss(problem, valid, token_weight, denominator, from_forward, with_grad)
    return quotient(loss, total, denominator), besides


def token_factors_are_equal(call: CrossEntropy | LogitsCrossEntropy | PolicyLoss) -> bool:
    """All tokens that count have one factor, and nobody asks for its gradient."""
    return call.reduction != "none" and call.token_weight is None and not differentiated(call.normalizer)


def one_pass_of(problem: TokenLosses) -> WithGrad | None:
    """None where backward makes the gradients, or nothing does."""
    input, linear_weight, _, linear_bias, _ = problem.operands
    known = options_in_situation(problem.loss, problem.logits)
    known |= {"main_grad": problem.main_grad is not None, "sparse": problem.sparse.gradient_threshold != 0.0}
    return losses_with_grad if gradients_in_the_same_pass(input, linear_weight, linear_bias, **known) else None


def reduction_in_operator(call: CrossEntropy | LogitsCrossEntropy | PolicyLoss, problem: TokenLosses) -> Reduction:
    """Of tokens whose factors are equal. The operator counts the tokens: in ATen that is seven launches."""
    input = problem.operands[0]
    if call.reduction == "mean" and call.normalizer is None and problem.denominator_weight is None:
        return Reduction(None)
    if call.normalizer is not None and call.normalizer.device != input.device:  # on the CPU, as a number would be
        return Reduction(None, scalar(1.0, input) * call.normalizer)
    denominator = denominator_of(call, problem)
    return Reduction(None, scalar(1.0, input) if denominator is None else denominator)


def denominator_of(call: CrossEntropy | LogitsCrossEntropy | PolicyLoss, problem: TokenLosses) -> Tensor | None:  # ()
    dtype, target = accumulation_dtype(problem.operands[0].dtype), problem.operands.target
    weight = problem.denominator_weight
    return denominator_of_all(call.reduction, call.normalizer, problem.valid, dtype, target, weight)


def token_losses(
    call: CrossEntropy | LogitsCrossEntropy, operands: Operands | LogitOperands, asked: Statistics
) -> TokenLosses:
    input = operands[0]
    loss, logits = loss_options(call.numbers, input), logit_options(call.numbers, input)
    return TokenLosses(operands, call.ignore_index, loss, logits, asked)


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


def losses_from_forward(problem: TokenLosses) -> tuple[Tensor, TokenStatistics]:  # (N,), 0 where ignored
    """Losses per token as differentiable ATen over the forward operator's three numbers per row."""
    operands, asked = problem.operands, problem.statistics
    found = torch.ops.flce.linear_cross_entropy_forward(
        *operands,
        ignore_index=problem.ignore_index,
        logit_sum=problem.loss.label_smoothing != 0.0,
        **problem.logits._asdict(),
        **asked_of_forward(asked),
        main_grad=problem.main_grad,
        **problem.sparse._asdict(),
    )
    target_logit, lse, logit_sum, *_, lse_rest, _ = found
    rows = (target_logit, lse, logit_sum, lse_rest)
    num_classes = operands.linear_weight.shape[0]
    losses, _ = losses_of_rows(operands, problem.ignore_index, problem.loss, num_classes, *rows, problem.target_weight)
    return losses, statistics_of_forward(asked, found)
