"""cross_entropy of plain tensors: picks the path, flattens the tokens, reduces in ATen over N numbers.

loss_and_argmax -> losses_with_grad       ..._with_grad_ | ..._with_grad
                -> losses_from_forward    ..._forward, then differentiable ATen

Around both stands plain.py's loss_of_tokens.
"""

from functools import partial

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_logits
from flce_ops.entry.plain import loss_of_tokens, token_losses
from flce_ops.entry.schemas import LogitsCrossEntropy
from flce_ops.entry.weighted import WithGrad
from flce_ops.math.options import LogitOperands, Statistics, TokenLosses
from flce_ops.math.reduction import Reduction
from flce_ops.objectives.cross_entropy import losses_of_rows
from flce_ops.ops.paths import path_of_given_logits

# N tokens, V vocabulary

OP = "cross_entropy"


def loss_and_argmax(call: LogitsCrossEntropy, argmax: bool, handed_over: bool) -> tuple[Tensor, Tensor | None]:
    check_logits(OP, call)
    shape, tokens = call.target.shape, call.target.numel()
    logits, copied = rows_of(call.logits, tokens)
    problem = token_losses(
        call, LogitOperands(logits, call.target.reshape(tokens), call.weight), Statistics(argmax=argmax)
    )
    with_grad = None if call.reduction == "none" else one_pass_of(logits, handed_over or copied)
    loss, largest = loss_of_tokens(call, problem, losses_from_forward, with_grad)
    return loss.reshape(shape) if call.reduction == "none" else loss, largest.reshape(shape) if argmax else None


def rows_of(logits: Tensor, tokens: int) -> tuple[Tensor, bool]:
    """(N, V), and whether that is a copy, which is nobody else's."""
    shape = (tokens, logits.shape[-1])
    try:
        return logits.view(shape), False
    except (RuntimeError, ValueError):  # ValueError: a fake tensor's
        return logits.reshape(shape), True


def one_pass_of(logits: Tensor, handed_over: bool) -> WithGrad | None:
    """None where backward makes the gradient, or nothing does."""
    ops = {"in place": torch.ops.flce.cross_entropy_with_grad_, "one pass": torch.ops.flce.cross_entropy_with_grad}
    op = ops.get(path_of_given_logits(logits, handed_over))
    return None if op is None else partial(losses_with_grad, op)


def losses_with_grad(
    op: torch._ops.OpOverloadPacket, problem: TokenLosses, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor]:
    """() with its gradient, the losses of tokens (N,), and argmax: (N,) or (0,)."""
    loss, losses, *_, largest = op(*problem.operands, *reduction, **problem.options, argmax=problem.statistics.argmax)
    return loss, losses, largest


def losses_from_forward(problem: TokenLosses) -> tuple[Tensor, Tensor]:  # (N,), 0 where ignored; argmax (N,) or (0,)
    """Losses per token as differentiable ATen over the forward operator's three numbers per row."""
    operands = problem.operands
    target_logit, lse, logit_sum, largest, lse_rest = torch.ops.flce.cross_entropy_forward(
        *operands,
        ignore_index=problem.ignore_index,
        logit_sum=problem.loss.label_smoothing != 0.0,
        **problem.logits._asdict(),
        argmax=problem.statistics.argmax,
    )
    rows = (target_logit, lse, logit_sum, lse_rest)
    losses, _ = losses_of_rows(operands, problem.ignore_index, problem.loss, operands.logits.shape[1], *rows)
    return losses, largest
