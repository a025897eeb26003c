"""The bodies of the entry operators of row losses: cross-entropy of a head and of given logits, log-probabilities, and
functions of one token. kl_div.py has the divergences.

The entry operators are CompositeImplicitAutograd, as ATen's scaled_dot_product_attention is. Their bodies see
requires_grad, autocast and tensor subclasses. What they do beyond the inner operators is differentiable ATen over N
numbers. Results of a row that are not requested are (0,).

    log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij

With K classes per token, log_prob_ik = z_iyk - lse_i, and the tail's log p is log(1 - sum_k e^log_prob_ik).

A loss of given logits may overwrite logits that were handed over; DTensors are never overwritten. Autocast changes
nothing for given logits: for any dtype the loss is float32 (float64 for float64), as F.cross_entropy's is under
autocast.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..distributed import OneRank, any_dtensor, vocab_parallel
from ..math.options import Number, Operands, Statistics, TokenLosses, TokenStatistics, accumulation_dtype
from ..math.statistics import log_probs_of_rows, log_probs_of_targets
from ..math.token_weights_and_denominator import Reduction, accuracy_of, count_right_and_valid, target_is_argmax
from ..meta.arguments import (
    CrossEntropy,
    CrossEntropyMetrics,
    LogitsCrossEntropy,
    LogProbs,
    PolicyLoss,
    WithGrad,
    WithGradInPlace,
)
from ..meta.arguments import TokenLoss as Call
from ..meta.checks import check_main_grad
from ..objectives.policy import policy_of
from ..objectives.token_function import TokenLoss, harmless, own, token_loss_named, zero_where
from ..ops.made_in_forward import remember_handed_over
from ..ops.paths import given_logits_facts, gradients_in_the_same_pass, gradients_wanted, path_of_loss
from .arguments import OP, check_arguments, check_head, check_logits, check_policy_loss, check_token_loss
from .kl_div import loss_of_probabilities
from .loss import (
    NONE_ASKED,
    NOTHING,
    FromWithGrad,
    layout_of_call,
    loss_of_tokens,
    losses_and_statistics,
    rows_of,
    token_losses,
)
from .rewrites import check_class_order, in_class_order, in_order_of_ids, losses_of_positions

# N tokens, K classes of a target, D hidden, V vocabulary


# results of torch.ops.flce.linear_cross_entropy_metrics after the loss
RESULTS = ("token_accuracy", "is_top1", *Statistics._fields)
OF_ARGMAX = ("token_accuracy", "is_top1", "argmax")
OF_LSE = ("lse", "z_loss")
NAMES = (*RESULTS, "z_loss")
OF_LOG_PROBS = ("log_sum_sq_probs", "mean_logit")


def checked_names(
    op: str, names: Sequence[str], known: tuple[str, ...], argument: str = "return_metrics"
) -> tuple[str, ...]:
    if isinstance(names, (str, bool)) or not isinstance(names, Sequence):
        raise TypeError(f"{op}: expected {argument} to be a sequence of names, got {names!r}")
    for name in names:
        if name not in known:
            raise ValueError(f"{op}: expected {argument} to name some of {', '.join(known)}; got {name!r}")
    return tuple(names)


def statistics_for(names: Sequence[str]) -> Statistics:
    asked = {name: name in names for name in Statistics._fields}
    asked["argmax"] = any(name in names for name in OF_ARGMAX)
    asked["lse"] = any(name in names for name in OF_LSE)
    return Statistics(**asked)


def by_name(names: Sequence[str], results: Sequence[Tensor], z_loss: Number) -> dict[str, Tensor]:
    found = dict(zip(RESULTS, results, strict=True))
    if "z_loss" in names:
        found["z_loss"] = found["lse"].square() * z_loss
    return {name: found[name] for name in names}


def accuracy_and_top1(argmax: Any, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:  # (), (...)
    """Returns the accuracy over all tokens, and is_top1. Both are DTensors if argmax is one. Then argmax and `target`
    on a rank belong to the same tokens.
    """
    if any_dtensor(argmax):
        from ..distributed.layout import accuracy_and_top1 as of_ranks

        return of_ranks(argmax, target, ignore_index)
    is_top1 = target_is_argmax(argmax, target, ignore_index)
    return accuracy_of(count_right_and_valid(is_top1, target, ignore_index)), is_top1


def cross_entropy_metrics(call: CrossEntropyMetrics) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics. Results that are not requested are (0,).

    Returns (loss, token_accuracy, is_top1, argmax, lse, entropy, log_sum_sq_probs, mean_logit). token_accuracy and
    is_top1 come with argmax.
    """
    loss, statistics = cross_entropy(call, call.statistics)
    accuracy = is_top1 = None
    if statistics.argmax is not None:
        accuracy, is_top1 = accuracy_and_top1(statistics.argmax, call.target, call.ignore_index)
    local = cast(Any, loss).to_local() if any_dtensor(loss) else loss
    return loss, *(local.new_zeros(0) if result is None else result for result in (accuracy, is_top1, *statistics))


def cross_entropy(call: CrossEntropy, asked: Statistics = NONE_ASKED) -> tuple[Tensor, TokenStatistics]:
    """Body of torch.ops.flce.linear_cross_entropy, which returns the first of the two results."""
    if call.gradient_class_order is not None:
        check_class_order(OP, call)
    layout = layout_of_call(OP, call)
    if call.linear_weight.dim() > 2:
        return losses_of_positions(call, asked, cross_entropy)
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
    with_grad: FromWithGrad | None = None
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


def losses_with_grad(
    problem: TokenLosses,
    reduction: Reduction,
    operator: type[WithGrad] = WithGrad,
    handed_over: Tensor | None = None,  # the caller's own logits
) -> tuple[Tensor, Tensor, TokenStatistics]:
    """Returns the loss () with its gradients, the losses of tokens (N,), and the statistics."""
    values = operator.like(problem, reduction=reduction, output_mask=gradients_wanted(problem.operands))
    loss, losses, *found = operator.applied(values)
    if handed_over is not None:
        remember_handed_over(loss, handed_over)
    asked = problem.statistics
    if not any(asked):
        return loss, losses, NOTHING
    if operator is WithGradInPlace:
        return loss, losses, TokenStatistics(found[0])
    return loss, losses, TokenStatistics.found(asked, found[3:8])


OP_OF_LOGITS = "cross_entropy"
OPERATORS = {"in place": WithGradInPlace, "one pass": WithGrad}  # otherwise backward makes the gradient


def logits_metrics(call: LogitsCrossEntropy, handed_over: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, token_accuracy, argmax)."""
    loss, argmax = logits_cross_entropy(call, handed_over, argmax=True)
    assert argmax is not None
    return loss, accuracy_and_top1(argmax, call.target, call.ignore_index)[0], argmax


def logits_cross_entropy(
    call: LogitsCrossEntropy, handed_over: bool, argmax: bool = False
) -> tuple[Tensor, Tensor | None]:
    layout = layout_of_call(OP_OF_LOGITS, call)
    check_logits(OP_OF_LOGITS, call)
    layout.measure(call.logits, call.logits.shape[-1])
    logits, copied = flattened(layout.columns(call.logits))
    operands = Operands(logits, None, layout.per_token(call.target), None, layout.whole(call.weight))
    problem = token_losses(OP_OF_LOGITS, layout, call, operands, Statistics(argmax=argmax))
    operator, own = None, call.logits if handed_over and not copied and not layout.is_mesh else None
    if call.reduction != "none" and not layout.splits_vocabulary:
        facts = given_logits_facts(logits, (handed_over or copied) and not layout.is_mesh)
        operator = OPERATORS.get(path_of_loss("a scalar loss of given logits", facts))
    with_grad = None if operator is None else partial(losses_with_grad, operator=operator, handed_over=own)
    loss, (largest, *_) = loss_of_tokens(layout, call, problem, partial(losses_and_statistics, layout), with_grad)
    return loss, largest


def flattened(logits: Tensor) -> tuple[Tensor, bool]:
    """Returns the logits as (N, V), and whether that tensor is a copy. A copy may be overwritten, because nobody else
    can read it.
    """
    shape = (math.prod(logits.shape[:-1]), logits.shape[-1])
    try:
        return logits.view(shape), False
    except (RuntimeError, ValueError):  # ValueError: from a fake tensor
        return logits.reshape(shape), True


OP_OF_LOG_PROBS = "linear_log_probs"


def log_probs(call: LogProbs) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_log_probs. Results that are not requested are (0,)."""
    layout = layout_of_call(OP_OF_LOG_PROBS, call)
    check_head(OP_OF_LOG_PROBS, call)
    operands = layout.head(call)
    asked = Statistics(call.argmax, True, call.entropy, call.log_sum_sq_probs, call.mean_logit)
    problem = token_losses(OP_OF_LOG_PROBS, layout, call, operands, asked)
    results = log_probs_of_rows(operands.target, call.ignore_index, rows_of(layout, problem), asked, tail=call.tail)
    present = (True, True, call.entropy, call.argmax, call.log_sum_sq_probs, call.mean_logit, call.tail)
    return tuple(layout.result(of_rows) if there else of_rows for of_rows, there in zip(results, present, strict=True))


def token_loss(call: Call) -> tuple[Tensor, Tensor]:
    function = token_loss_named(call.function)
    layout = layout_of_call(function.op, call)
    check_token_loss(function.op, call, function)
    return loss_of_function(layout, call, function, call.tensors)


def policy_loss(call: PolicyLoss) -> tuple[Tensor, Tensor]:
    op = "linear_policy_loss"
    layout = layout_of_call(op, call)
    check_policy_loss(op, call)
    return loss_of_function(layout, call, *policy_of(op, call.own, call.tokens, call.input))


def loss_of_function(
    layout: OneRank, call: Call | PolicyLoss, function: TokenLoss, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns (loss, log_probs): the loss is () or (...), the log-probabilities have the target's shape."""
    operands = layout.head(call)
    dtype = accumulation_dtype(operands.input.dtype)
    tensors = [layout.per_token(tensor) if tensor.dim() else layout.whole(tensor) for tensor in tensors]
    tensors = [own(tensor.to(dtype) if tensor.is_floating_point() else tensor) for tensor in tensors]
    problem = token_losses(function.op, layout, call, operands)
    with_grad = None
    if call.reduction != "none" and not layout.splits_vocabulary:
        known = {"sparse": call.sparse.gradient_threshold != 0.0, "entropy": "entropy" in function.reads}
        if gradients_in_the_same_pass(problem, "a scalar loss of token functions", **known):
            with_grad = partial(function_with_grad, function, tensors)
    from_forward = partial(function_of_rows, function, tensors, layout)
    loss, (log_probs,) = loss_of_tokens(layout, call, problem, from_forward, with_grad)
    return loss, log_probs


def function_with_grad(
    function: TokenLoss, tensors: list[Tensor], problem: TokenLosses, reduction: Reduction
) -> tuple[Tensor, Tensor, tuple[Tensor]]:
    """Returns the loss () with its gradients, the losses of tokens (N,), and their log-probabilities."""
    values = WithGrad.like(
        problem,
        function=function.name,
        tensors=tensors,
        reduction=reduction,
        output_mask=gradients_wanted(problem.operands),
    )
    loss, losses, *_, log_probs, _ = WithGrad.applied(values)
    return loss, losses, (log_probs,)


def function_of_rows(
    function: TokenLoss, tensors: list[Tensor], layout: OneRank, problem: TokenLosses
) -> tuple[Tensor, tuple[Tensor]]:
    """Losses (N,), 0 for ignored tokens, and log-probabilities, (N,) or (N, K), detached."""
    reads, valid, target = function.reads, problem.valid, problem.operands.target
    rows = rows_of(layout, replace(problem, statistics=Statistics(entropy="entropy" in reads)))
    counts = target != problem.ignore_index
    log_probs = log_probs_of_targets(counts, rows.target_logit, rows.lse_pair)
    beside = {"lse": rows.lse}
    if "entropy" in reads:
        beside["entropy"] = 0.0 - rows.expected_log_prob
    numbers = [harmless("log_prob", log_probs, counts), *(harmless(name, beside[name], valid) for name in reads)]
    losses = function.losses(numbers, [zero_where(~valid, tensor) for tensor in tensors])
    return torch.where(valid, losses, 0.0), (log_probs.detach(),)
