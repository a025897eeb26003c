"""Tokens whose loss is multiplied by 0: the operators leave them out as they do ignored tokens.

They stay in the denominators and in token_accuracy, which go by the target. They are computed where their losses are
wanted, as the gradient of token_weight; where metrics are; and over a denominator of 0 or nan, which makes nan of a
weight of 0 as of any other.
"""

import torch
from torch import Tensor

from flce_ops.math.options import TokenLosses
from flce_ops.math.slots import beside_slots
from flce_ops.support.differentiated import differentiated

# N tokens, V vocabulary


def weightless(token_weight: Tensor | None, factor: Tensor) -> Tensor | None:  # (N,) bool, None for none
    """`factor` (N,) multiplies the losses: token_weight over the denominator."""
    if token_weight is None or differentiated(token_weight):
        return None
    return factor.detach() == 0.0


def without_weightless(
    problem: TokenLosses, token_weight: Tensor | None, factor: Tensor, num_classes: int
) -> TokenLosses:
    """`problem` with ignore_index in place of their targets; one that is out of range stays, to be refused."""
    out = None if any(problem.statistics) else weightless(token_weight, factor)
    if out is None:
        return problem
    target = problem.operands.target
    out = beside_slots(out, target)
    target = torch.where(out & (target >= 0) & (target < num_classes), problem.ignore_index, target)
    return problem._replace(operands=problem.operands._replace(target=target))


def valid_and_weighted(valid: Tensor | None, token_weight: Tensor, factor: Tensor) -> Tensor | None:  # (N,) bool
    """The same for linear_kl_div, whose operators take which tokens count; None for all."""
    out = weightless(token_weight, factor)
    if out is None:
        return valid
    return ~out if valid is None else valid & ~out
