"""The derivative of the backward operator along a direction, for torch.autograd.functional.hvp and jvp.

hvp and jvp differentiate a vector-Jacobian product by its vector. The double-backward operator is linear in the
cotangents input', linear_weight' and bias' (flce_ops/aten/double_backward.py). Its derivative by these cotangents is
therefore the transposed map: from a direction in the backward operator's arguments to the change of its results. Primes
mark the direction and the changes:

    u' = input' @ linear_weight.T + input @ linear_weight'.T + bias'      z' = f' u'      p' = p (z' - sum_j p_j z'_j)
    d  = l p + m w + a [j = y]                                                d' = l' p + l p' + m' w + a' [j = y]
    G  = d f'                                                                 G' = d' f' + d f'' u'

    grad_input' = G' @ linear_weight + G @ linear_weight'       grad_linear_weight' = G'.T @ input + G.T @ input'
    grad_linear_bias' = G'.T @ 1

(f' and f'' are dz/du and its derivative. In the code every other prime is written `_dot`.)
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..math.options import Cotangents
from ..math.shards import target_columns
from ..meta.arguments import DoubleBackward
from ..meta.outputs import Outputs, allocate
from .logits import add_target_and_sum, apply_slope
from .second_order import SecondOrder, slope_derivative
from .valid_tokens import on_valid_tokens

# N tokens, D hidden, V vocabulary


class Direction(NamedTuple):
    """A direction: one entry for each result of linear_cross_entropy_double_backward, which are arguments of the
    backward operator.
    """

    grad_target_logit: Tensor | None  # (N,)
    grad_lse: Tensor | None  # (N,)
    grad_logit_sum: Tensor | None  # (N,)
    input: Tensor | None  # (N, D)
    linear_weight: Tensor | None  # (V, D)
    linear_bias: Tensor | None  # (V,)


def backward_tangent(direction: Direction, call: DoubleBackward) -> Outputs:
    """The change of the backward operator's gradients, at the arguments of `call`. Does not read `call.grad_grads`."""
    of_gradients = slice(3, None)  # their places among the results of `call`
    out = allocate(call.results[of_gradients], call)
    on_valid_tokens(tangent_of_rows, call, out, call.fills[of_gradients], direction)
    return out


def tangent_of_rows(call: DoubleBackward, out: Sequence[Tensor], direction: Direction) -> None:
    _, linear_weight, target, _, weight = call.operands
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    cotangents = call.cotangents.masked(hit, valid, call.lse.dtype).filled(call.lse)
    change_of = Cotangents(*direction[:3]).masked(hit, valid, call.lse.dtype).filled(call.lse)
    sums = SecondOrder(call, direction[3:], out)
    for rows in sums.chunks():
        u_dot = sums.change_of_logits(rows)
        z, slope, p = sums.logits(rows)
        z_dot = u_dot if slope is None else u_dot * slope
        lse_dot = (p * z_dot).sum(1, keepdim=True)
        d_dot = p * (change_of.grad_lse[rows, None] + cotangents.grad_lse[rows, None] * (z_dot - lse_dot))
        add_target_and_sum(d_dot, column[rows], change_of.of(rows), weight)
        d = p * cotangents.grad_lse[rows, None]
        add_target_and_sum(d, column[rows], cotangents.of(rows), weight)
        change = apply_slope(d_dot, slope)
        if call.logits.softcap is not None:
            change += d * u_dot * slope_derivative(z, slope, call.logits.of(rows))
        sums.add(rows, change, apply_slope(d, slope))
        del u_dot, z, slope, p, z_dot, d_dot, d, change  # frees memory before the next chunk is allocated
    sums.finish()
