"""The derivative of the backward operator along a direction: what torch.autograd.functional.hvp and jvp come to.

Both differentiate a vector-Jacobian product by its vector. The double-backward operator is linear in the cotangents
A, C, c that it is given (flce_ops/aten/double_backward.py), so its derivative by them is the transposed map: from a
direction in the backward operator's arguments to the change of its results. With dots for that direction,

    u' = input' @ linear_weight.T + input @ linear_weight'.T + bias'      z' = f' u'      p' = p (z' - sum_j p_j z'_j)
    d  = l p + s w + a [j = y]                                                d' = l' p + l p' + s' w + a' [j = y]
    G  = d f'                                                                 G' = d' f' + d f'' u'

    grad_input' = G' @ linear_weight + G @ linear_weight'       grad_linear_weight' = G'.T @ input + G.T @ input'
    grad_linear_bias' = G'.T @ 1

(f' and f'' are dz/du and its derivative, and a prime on anything else is a dot.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flce_ops.aten.chunks import chunk_product, row_chunks, rows_per_chunk
from flce_ops.aten.double_backward import normalized, slope_derivative
from flce_ops.aten.logits import add_target_and_sum, apply_slope, chunk_logits_with_slope, probabilities
from flce_ops.math.options import Cotangents
from flce_ops.math.shards import target_columns
from flce_ops.meta.arguments import DoubleBackward
from flce_ops.meta.outputs import Gradients, gradient_outputs

# N tokens, D hidden, V vocabulary


class Direction(NamedTuple):
    """One entry for each result of linear_cross_entropy_double_backward, that is, argument of the backward operator."""

    grad_target_logit: Tensor | None  # (N,)
    grad_lse: Tensor | None  # (N,)
    grad_logit_sum: Tensor | None  # (N,)
    input: Tensor | None  # (N, D)
    linear_weight: Tensor | None  # (V, D)
    linear_bias: Tensor | None  # (V,)


def backward_tangent(direction: Direction, call: DoubleBackward) -> Gradients:
    """Change of the gradients of the backward operator at the arguments of `call`, whose `grad_grads` are not read."""
    input, linear_weight, target, linear_bias, weight = call.operands
    lse, lse_rest, softcap = call.lse, call.lse_rest, call.logits.softcap
    num_classes, dtype = linear_weight.shape[0], lse.dtype
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, num_classes)
    cotangents = call.cotangents.kept(hit, valid, dtype).filled(lse)
    change_of = Cotangents(*direction[:3]).kept(hit, valid, dtype).filled(lse)
    out_input, out_weight, out_bias = gradient_outputs(call.operands, [True, True, linear_bias is not None])
    weight_sum = torch.zeros_like(linear_weight, dtype=dtype)
    bias_sum = torch.zeros_like(out_bias, dtype=dtype)

    # u', p, d, d' and two on the way there; with a softcap slope and one more
    step = rows_per_chunk(input, num_classes, matrices=6 if softcap is None else 8)
    for rows in row_chunks("linear_cross_entropy_backward_tangent", input, step):
        x = input[rows]
        u_dot = torch.zeros(x.shape[0], num_classes, dtype=dtype, device=x.device)
        if direction.input is not None:
            u_dot += chunk_product(direction.input[rows], linear_weight)
        if direction.linear_weight is not None:
            u_dot += chunk_product(x, direction.linear_weight)
        if direction.linear_bias is not None:
            u_dot += direction.linear_bias.to(dtype)

        z, slope = chunk_logits_with_slope(x, linear_weight, linear_bias, call.logits)
        p = normalized(probabilities(z, lse[rows], None if lse_rest is None else lse_rest[rows]))
        z_dot = u_dot if slope is None else u_dot * slope
        lse_dot = (p * z_dot).sum(1, keepdim=True)
        d_dot = p * (change_of.grad_lse[rows, None] + cotangents.grad_lse[rows, None] * (z_dot - lse_dot))
        add_target_and_sum(d_dot, column[rows], change_of.of(rows), weight)
        d = p * cotangents.grad_lse[rows, None]
        add_target_and_sum(d, column[rows], cotangents.of(rows), weight)
        change = apply_slope(d_dot, slope)
        if softcap is not None:
            change += d * u_dot * slope_derivative(z, slope, call.logits)
        gradient = apply_slope(d, slope).to(x.dtype)
        bias_sum += change.sum(0) if linear_bias is not None else 0.0
        change = change.to(x.dtype)
        out_input[rows] = change @ linear_weight
        weight_sum += change.T @ x
        if direction.linear_weight is not None:
            out_input[rows] += gradient @ direction.linear_weight
        if direction.input is not None:
            weight_sum += gradient.T @ direction.input[rows]
        del u_dot, z, slope, p, z_dot, d_dot, d, change, gradient  # before the next chunk's are allocated
    out_weight.copy_(weight_sum)
    out_bias.copy_(bias_sum)
    return out_input, out_weight, out_bias
