"""Losses that are a function of one token, and policy losses, which are such functions.

torch.ops.flce.linear_token_loss -> composite -> loss_of_tokens in loss.py, which calls one of these two

    losses_with_grad    one pass: linear_cross_entropy_with_grad
    losses_of_rows      the function in differentiable ATen over N row numbers of a forward operator; for a function of
                        the entropy and with a sharded vocabulary, too
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..distributed.one_rank import OneRank
from ..math.options import Statistics, TokenLosses, accumulation_dtype
from ..math.reduction import Reduction
from ..math.statistics import log_probs_of_targets
from ..meta.arguments import WithGrad
from ..objectives.policy import policy_of
from ..objectives.token_function import TokenLoss, harmless, own, token_loss_named, zero_where
from ..ops.call_facts import gradients_wanted
from ..ops.paths import gradients_in_the_same_pass
from .arguments import check_policy_loss, check_token_loss
from .loss import layout_of_call, loss_of_tokens, rows_of, token_losses
from .schemas import PolicyLoss
from .schemas import TokenLoss as Call

# N tokens, K classes of a target


def composite(call: Call) -> tuple[Tensor, Tensor]:
    function = token_loss_named(call.function)
    layout = layout_of_call(function.op, call)
    check_token_loss(function.op, call, function)
    return loss_of_function(layout, call, function, call.tensors)


def composite_policy(call: PolicyLoss) -> tuple[Tensor, Tensor]:
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
            with_grad = partial(losses_with_grad, function, tensors)
    from_forward = partial(losses_of_rows, function, tensors, layout)
    loss, (log_probs,) = loss_of_tokens(layout, call, problem, from_forward, with_grad)
    return loss, log_probs


def losses_with_grad(
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


def losses_of_rows(
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
