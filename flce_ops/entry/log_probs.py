"""Log-probabilities of given tokens, and losses that are functions of them.

torch.ops.flce.linear_log_probs -> composite -> a forward operator -> ATen over N numbers

    log_prob_i = z_iy - lse_i      entropy_i = lse_i - sum_j p_ij z_ij      argmax_i = argmax_j z_ij

With K classes per token, log_prob_ik = z_iyk - lse_i, and the tail's log p is log(1 - sum_k e^log_prob_ik).

torch.ops.flce.linear_policy_loss, and the operators of other objectives that have their own:

    composite_loss -> losses_with_grad    one pass: linear_policy_loss_with_grad
                   -> losses_of_rows      differentiable ATen over log-probabilities; the only way with a sharded
                                          vocabulary

loss_of_tokens in loss.py calls these two. Schemas, kernels and derivatives follow from the tokens, numbers and options
of the objective (flce_ops/objectives/row.py).
"""

from functools import partial

import torch
from torch import Tensor

from ..distributed.one_rank import OneRank
from ..math.options import Statistics, TokenLosses, accumulation_dtype, changed
from ..math.reduction import Reduction
from ..math.statistics import log_probs_of_rows, log_probs_of_targets
from ..meta.arguments import ROW_LOSSES, RowOperands
from ..objectives.row import RowObjective
from ..ops.call_facts import gradients_wanted
from ..ops.paths import gradients_in_the_same_pass
from .arguments import check_head, check_row_loss
from .loss import layout_of_call, loss_of_tokens, rows_of, token_losses
from .schemas import LogProbs, RowLoss

# N tokens, K classes of a target, D hidden, V vocabulary

OP = "linear_log_probs"


def composite(call: LogProbs) -> tuple[Tensor, ...]:
    """Body of torch.ops.flce.linear_log_probs. Results that are not requested are (0,)."""
    layout = layout_of_call(OP, call)
    check_head(OP, call)
    operands = layout.head(call)
    asked = Statistics(call.argmax, True, call.entropy, call.log_sum_sq_probs, call.mean_logit)
    problem = token_losses(OP, layout, call, operands, asked)
    results = log_probs_of_rows(operands.target, call.ignore_index, rows_of(layout, problem), asked, tail=call.tail)
    present = (True, True, call.entropy, call.argmax, call.log_sum_sq_probs, call.mean_logit, call.tail)
    return tuple(layout.result(of_rows) if there else of_rows for of_rows, there in zip(results, present, strict=True))


def composite_loss(call: RowLoss) -> tuple[Tensor, Tensor]:
    """Returns (loss, log_probs): the loss is () or (...), the log-probabilities are (...)."""
    op = call.objective.name
    layout = layout_of_call(op, call)
    check_row_loss(op, call)
    options = call.objective.made_of(call.own, call.tokens, call.input)
    call.objective.check(op, options, call.tokens)
    operands = layout.head(call)
    dtype = accumulation_dtype(operands.input.dtype)
    objective = call.objective(options, changed(call.tokens, lambda values: layout.per_token(values).to(dtype)))
    problem = token_losses(op, layout, call, operands)
    with_grad = None
    if call.reduction != "none" and not layout.splits_vocabulary:
        sparse = call.sparse.gradient_threshold != 0.0
        if gradients_in_the_same_pass(operands, "a scalar loss of a policy", sparse=sparse):
            with_grad = partial(losses_with_grad, objective)
    loss, (log_probs,) = loss_of_tokens(layout, call, problem, partial(losses_of_rows, objective, layout), with_grad)
    return loss, log_probs


def losses_with_grad(
    objective: RowObjective, problem: TokenLosses, reduction: Reduction
) -> tuple[Tensor, Tensor, tuple[Tensor]]:
    """Returns the loss () with its gradients, and the losses of tokens and their log-probabilities, (N,) each."""
    call = ROW_LOSSES[objective.name].like(
        problem,
        operands=RowOperands(*problem.operands[:4]),
        tokens=objective.tokens,
        reduction=reduction,
        options=objective.options,
        output_mask=gradients_wanted(problem.operands),
    )
    loss, losses, *_, log_probs, _ = call.dispatched()
    return loss, losses, (log_probs,)


def losses_of_rows(objective: RowObjective, layout: OneRank, problem: TokenLosses) -> tuple[Tensor, tuple[Tensor]]:
    """Losses and log-probabilities, (N,) each, 0 for ignored tokens. The second is detached."""
    rows, valid = rows_of(layout, problem), problem.valid
    log_probs = log_probs_of_targets(valid, rows.target_logit, rows.lse, rows.lse_rest)
    tokens = changed(objective.tokens, lambda values: torch.where(valid, values, 0.0))
    losses, _ = objective._replace(tokens=tokens).losses_and_slopes(-log_probs, rows.lse, None)
    return torch.where(valid, losses, 0.0), (log_probs.detach(),)
