"""The body of the entry operators of objectives with their own operators, such as linear_policy_loss. The loss of a
token is a function of its log-probability.

composite -> losses_with_grad    one pass: linear_policy_loss_with_grad
          -> losses_of_rows      differentiable ATen over log-probabilities; the only way with a sharded vocabulary
                                 or with a support

loss_of_tokens in loss.py calls these two. Schemas, kernels and derivatives follow from the tokens, numbers and options
of the objective (flce_ops/objectives/row.py).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..distributed.one_rank import OneRank
from ..math.log_probs import log_probs_of_targets
from ..math.options import TokenLosses, changed, logit_options
from ..math.precision import accumulation_dtype
from ..math.reduction import Reduction
from ..meta.arguments import ROW_LOSSES, RowOperands
from ..objectives.cross_entropy import LossOptions
from ..objectives.row import RowObjective
from ..ops.call_facts import gradients_wanted
from ..ops.paths import gradients_in_the_same_pass
from .arguments import check_row_loss
from .loss import layout_of_call, loss_of_tokens, rows_of
from .schemas import RowLoss
from .support import support_of_call
from .token_temperature import temperature_of_tokens

# N tokens, D hidden, V vocabulary


def composite(call: RowLoss) -> tuple[Tensor, Tensor]:
    """Returns (loss, log_probs): the loss is () or (...), the log-probabilities are (...)."""
    op = call.objective.name
    layout = layout_of_call(op, call)
    check_row_loss(op, call)
    options = call.objective.made_of(call.own, call.tokens, call.input)
    call.objective.check(op, options, call.tokens)
    operands = layout.head(call)
    dtype = accumulation_dtype(operands.input.dtype)
    objective = call.objective(options, changed(call.tokens, lambda values: layout.per_token(values).to(dtype)))
    logits = logit_options(call.numbers, operands.input, temperature_of_tokens(op, call, layout, operands.target))
    problem = TokenLosses(operands, call.ignore_index, LossOptions(), logits)
    problem.sparse, problem.batch_invariant = call.sparse, call.batch_invariant
    problem.support = support_of_call(op, layout, call, operands.target)
    with_grad = None
    if call.reduction != "none" and problem.support is None and not layout.splits_vocabulary:
        known: dict[str, Any] = {"title": "a scalar loss of a policy", "sparse": call.sparse.gradient_threshold != 0.0}
        if gradients_in_the_same_pass(operands, **known):
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
    loss, losses, *_, log_probs = call.dispatched()
    return loss, losses, (log_probs,)


def losses_of_rows(objective: RowObjective, layout: OneRank, problem: TokenLosses) -> tuple[Tensor, tuple[Tensor]]:
    """Losses and log-probabilities, (N,) each, 0 for ignored tokens. The second is detached."""
    rows, valid = rows_of(layout, problem), problem.valid
    log_probs = log_probs_of_targets(valid, rows.target_logit, rows.lse, rows.lse_rest)
    tokens = changed(objective.tokens, lambda values: torch.where(valid, values, 0.0))
    losses, _ = objective._replace(tokens=tokens).losses_and_slopes(-log_probs, rows.lse, None)
    return torch.where(valid, losses, 0.0), (log_probs.detach(),)
