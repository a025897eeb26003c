"""The losses of tokens with their weights, and the scalar loss made of them: of a head or of given logits.

weighted_losses -> from_forward                  reduction="none"
weighted_loss   -> with_grad | from_forward      a scalar loss
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flce_ops.entry.weightless import without_weightless
from flce_ops.math.options import TokenLosses
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction, row_factor, weighted_sum
from flce_ops.support.differentiated import differentiated

# N tokens

# Losses (N,), 0 where ignored, and what else is asked for.
FromForward = Callable[[TokenLosses], tuple[Tensor, Any]]
# The loss () with its gradients, and those two.
WithGrad = Callable[[TokenLosses, Reduction], tuple[Tensor, Tensor, Any]]


def weighted_losses(
    problem: TokenLosses,
    valid: Tensor,  # (N,)
    token_weight: Tensor | None,  # (N,)
    from_forward: FromForward,
) -> tuple[Tensor, Any]:
    """(N,), and what else is asked for."""
    if token_weight is None:
        return from_forward(problem)
    factor = torch.where(valid, token_weight, 0.0)
    losses, besides = from_forward(without_weightless(problem, token_weight, factor, problem.operands.num_classes))
    return losses * factor, besides


def weighted_loss(
    problem: TokenLosses,
    valid: Tensor,  # (N,)
    token_weight: Tensor | None,  # (N,)
    denominator: Tensor | None,  # ()
    from_forward: FromForward,
    with_grad: WithGrad | None,  # None where backward makes the gradients, or nothing does
) -> tuple[Tensor | None, Tensor, Any]:
    """Two numbers for `quotient`, and what else is asked for."""
    operands = problem.operands
    wants_gradient = differentiated(*operands, token_weight, denominator)
    if token_weight is None and not wants_gradient:
        losses, besides = from_forward(problem)
        return None, losses.sum(), besides
    row_scale = row_factor(valid, token_weight, denominator, accumulation_dtype(operands[0].dtype))
    problem = without_weightless(problem, token_weight, row_scale, operands.num_classes)
    if with_grad is not None:
        loss, losses, besides = with_grad(problem, Reduction(row_scale))
    else:
        losses, besides = from_forward(problem)
        loss = (row_scale * losses).sum() if wants_gradient else None
    return loss, weighted_sum(valid, token_weight, losses), besides
