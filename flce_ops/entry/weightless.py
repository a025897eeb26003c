"""Tokens whose loss is multiplied by 0: the operators leave them out as they do ignored tokens.

They stay in the denominators and in token_accuracy, which count the target's own ignore_index. Not left out are they
where their losses are wanted, as the gradient of token_weight, or their argmax.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce_ops.math.options import TokenLosses
from flce_ops.ops.paths import needs_gradient
from flce_ops.support.torch_private import functorch_is_active

# N tokens, V vocabulary


def weightless(token_weight: Tensor | None) -> Tensor | None:  # (N,) bool, None where no token is to be left out
    if token_weight is None or needs_gradient(token_weight) or functorch_is_active():
        return None
    if forward_ad.unpack_dual(token_weight).tangent is not None:
        return None
    return token_weight == 0.0


def without_weightless(problem: TokenLosses, token_weight: Tensor | None, num_classes: int) -> TokenLosses:
    """`problem` with ignore_index in place of their targets; one that is out of range stays, to be refused."""
    out = None if problem.argmax else weightless(token_weight)
    if out is None:
        return problem
    target = problem.operands.target
    out &= (target >= 0) & (target < num_classes)
    target = torch.where(out, problem.ignore_index, target)
    return problem._replace(operands=problem.operands._replace(target=target))


def valid_and_weighted(valid: Tensor | None, token_weight: Tensor | None) -> Tensor | None:  # (N,) bool, None for all
    """The same for linear_kl_div, whose operators take which tokens count."""
    out = weightless(token_weight)
    if out is None:
        return valid
    return ~out if valid is None else valid & ~out
