"""The derivatives of the scalar losses of a head, and how their gradients are made under create_graph.

Forward makes the gradients. Under create_graph they are made again, by the operators that have derivatives.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._ops import ops
from ..math.options import Operands, Statistics, changed
from ..math.statistics import Rows, asked_of_rows, log_probs_of_targets, surprisal
from ..math.topk import tokens_that_count
from ..meta.arguments import ROW_LOSSES, Backward, Forward, RowLossWithGrad, WithGrad
from ..meta.checks import check_constants
from ..objectives.cross_entropy import cross_entropy_of_call
from ..objectives.row import RowObjective
from ..support.holes import refuse_hole
from .made_in_forward import MadeInForward

# N tokens, D hidden, V vocabulary, r rank of the pair


class WithGradFunction(MadeInForward):
    arguments = WithGrad
    learns = ("logit_scale",)

    @classmethod
    def made_again(cls, call, grad_loss):
        if call.sparse.gradient_threshold:
            refuse_hole(cls.called(), "second of a sparse gradient")
        return differentiable_gradients(call, grad_loss)


class RowLossFunction(MadeInForward):
    learns = ("logit_scale",)
    reverse_modes = "grad, jacrev"

    @classmethod
    def check(cls, op, values):
        constants = cls.arguments.objective.tokens_of._fields
        check_constants(cls.arguments.op, **{name: values[cls.arguments.index[name]] for name in constants})

    @classmethod
    def made_again(cls, call, grad_loss):
        return differentiable_gradients(call, grad_loss)


ROW_LOSS_FUNCTIONS = tuple(
    type(f"{arguments.__name__}Function", (RowLossFunction,), {"arguments": arguments, "function": name})
    for name, arguments in ROW_LOSSES.items()
)


def differentiable_gradients(
    call: WithGrad | RowLossWithGrad, grad_loss: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients, multiplied by grad_loss, and the losses of tokens, as functions of the operands.

    Computed by the operators that have derivatives, not by torch.autograd.grad on the operands: the operands carry the
    graph that made them, and a path from one operand to another would be counted here and again by the caller.
    """
    forward, backward = ops.linear_cross_entropy_forward, ops.linear_cross_entropy_backward
    if isinstance(call, WithGrad):
        call.statistics = Statistics()  # the statistics are known already
    return recomputed_step(call, forward, backward, grad_loss)[:2]


def recomputed_step(
    call: WithGrad | RowLossWithGrad, forward: Callable, backward: Callable, grad_loss: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor, Sequence[Tensor | None]]:
    """Runs the forward and backward operators. Returns the gradients, multiplied by grad_loss, the losses, and the
    other per-token results.
    """
    operands, asked = Operands(*call.operands), asked_of_rows(call) if isinstance(call, WithGrad) else {}
    found = Forward.run(forward, Forward.like(call, operands=operands, **asked).values())
    rows, retained = Rows.of_forward(found), found[-1]
    valid = tokens_that_count(operands.target, call.ignore_index)
    objective, surprisals, besides = objective_of(call, operands, valid, rows)
    logit_sum = rows.logit_sum if asked.get("logit_sum") else None
    losses, slopes = objective.losses_and_slopes(surprisals, rows.lse, logit_sum)
    losses = torch.where(valid, losses, 0.0)
    scale = call.reduction.scale_of_tokens(valid, rows.lse.dtype)
    cotangents = objective.cotangents(slopes, scale if grad_loss is None else scale * grad_loss)
    known = {"lse": rows.lse, "lse_rest": rows.lse_rest, "retained": retained if retained.shape[0] else None}
    of_backward = Backward.like(call, cotangents=cotangents, operands=operands, **known)
    return Backward.run(backward, of_backward.values()), losses, besides


def objective_of(
    call: WithGrad | RowLossWithGrad, operands: Operands, valid: Tensor, rows: Rows
) -> tuple[RowObjective, Tensor, Sequence[Tensor | None]]:
    """Returns the objective, the surprisals that it reads, (N,) or (N, K), and the other per-token results."""
    dtype = rows.lse.dtype
    if isinstance(call, WithGrad):
        objective = cross_entropy_of_call(call, operands, operands.num_classes, dtype)
        return objective, surprisal(rows.target_logit, rows.lse, rows.lse_rest), rows.statistics(call.statistics)
    log_probs = log_probs_of_targets(valid, rows.target_logit, rows.lse, rows.lse_rest)
    tokens = changed(call.tokens, lambda values: torch.where(valid, values, 0.0).to(dtype))
    return call.objective(call.options, tokens), -log_probs, (log_probs,)
