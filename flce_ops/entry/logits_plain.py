"""cross_entropy of plain tensors: picks the path, flattens the tokens, reduces in ATen over N numbers.

loss_and_argmax -> weighted_loss -> ..._with_grad_ | ..._with_grad | ..._forward       a scalar loss
                -> losses_from_forward -> ..._forward                                  reduction="none"
"""

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_logits
from flce_ops.entry.schemas import LogitsCrossEntropy
from flce_ops.entry.weightless import without_weightless
from flce_ops.math.loss import losses_of_rows
from flce_ops.math.options import LogitOperands, Statistics, TokenLosses
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import denominator_of_all, quotient, row_factor, weighted_sum
from flce_ops.math.scalars import logit_options, loss_options
from flce_ops.ops.paths import path_of_given_logits
from flce_ops.support.differentiated import differentiated

# N tokens, V vocabulary

OP = "cross_entropy"


def loss_and_argmax(call: LogitsCrossEntropy, argmax: bool, handed_over: bool) -> tuple[Tensor, Tensor | None]:
    check_logits(OP, call)
    shape, tokens = call.target.shape, call.target.numel()
    logits, copied = rows_of(call.logits, tokens)
    problem = token_losses(call, LogitOperands(logits, call.target.reshape(tokens), call.weight), argmax)
    accumulate, valid = accumulation_dtype(logits.dtype), problem.valid
    token_weight = None if call.token_weight is None else call.token_weight.reshape(tokens).to(accumulate)
    if call.reduction == "none":
        losses, largest = weighted_losses(problem, valid, token_weight)
        return losses.reshape(shape), largest.reshape(shape) if argmax else None
    target, weight = problem.operands.target, call.weight
    denominator = denominator_of_all(call.reduction, call.normalizer, valid, accumulate, target, weight)
    loss, total, largest = weighted_loss(problem, valid, token_weight, denominator, handed_over or copied)
    return quotient(loss, total, denominator), largest.reshape(shape) if argmax else None


def rows_of(logits: Tensor, tokens: int) -> tuple[Tensor, bool]:
    """(N, V), and whether that is a copy, which is nobody else's."""
    shape = (tokens, logits.shape[-1])
    try:
        return logits.view(shape), False
    except (RuntimeError, ValueError):  # ValueError: a fake tensor's
        return logits.reshape(shape), True


def token_losses(call: LogitsCrossEntropy, operands: LogitOperands, argmax: bool) -> TokenLosses:
    logits = operands.logits
    loss, options = loss_options(call.numbers, logits), logit_options(call.numbers, logits)
    return TokenLosses(operands, call.ignore_index, loss, options, Statistics(argmax=argmax))


def weighted_losses(problem: TokenLosses, valid: Tensor, token_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(N,); argmax (N,) or (0,)."""
    if token_weight is None:
        return losses_from_forward(problem)
    factor = torch.where(valid, token_weight, 0.0)
    problem = without_weightless(problem, token_weight, factor, problem.operands.logits.shape[1])
    losses, largest = losses_from_forward(problem)
    return losses * factor, largest


def weighted_loss(
    problem: TokenLosses,
    valid: Tensor,  # (N,)
    token_weight: Tensor | None,  # (N,)
    denominator: Tensor | None,  # ()
    handed_over: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Two numbers for `quotient`, and argmax: (N,) or (0,)."""
    logits = problem.operands.logits
    wants_gradient = differentiated(logits, token_weight, denominator)
    if token_weight is None and not wants_gradient:
        losses, largest = losses_from_forward(problem)
        return None, losses.sum(), largest
    row_scale = row_factor(valid, token_weight, denominator, accumulation_dtype(logits.dtype))
    problem = without_weightless(problem, token_weight, row_scale, logits.shape[1])
    path = path_of_given_logits(logits, handed_over)
    if path == "recompute":
        losses, largest = losses_from_forward(problem)
        loss = (row_scale * losses).sum() if wants_gradient else None
        return loss, weighted_sum(valid, token_weight, losses), largest
    ops = torch.ops.flce
    with_grad = ops.cross_entropy_with_grad_ if path == "in place" else ops.cross_entropy_with_grad
    loss, losses, *_, largest = with_grad(
        *problem.operands, row_scale, **problem.options, argmax=problem.statistics.argmax
    )
    return loss, weighted_sum(valid, token_weight, losses), largest


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
    _, losses, _ = losses_of_rows(operands, problem.ignore_index, problem.loss, operands.logits.shape[1], *rows)
    return losses, largest
