"""The two derivatives of the backward operator, in chunked ATen on every device: double_backward is what
create_graph=True and hessians need, backward_tangent what torch.autograd.functional.hvp and jvp need. Those of given
logits are in ops/cross_entropy_autograd.py.

With z, p, f' as in flce_ops/aten/logits.py, the backward operator computes, from cotangents a, l, m,

    d_ij = l_i p_ij + m_i w_j + a_i [j = y_i]      G = d f'      (G @ linear_weight, G.T @ input, G.T @ 1)

**double_backward.** Let input', linear_weight' and bias' be the cotangents of those three results. Then L = sum_ij G_ij
u'_ij with

    u' = input' @ linear_weight.T + input @ linear_weight'.T + bias'      z' = f' u'      lse'_i = sum_j p_ij z'_ij

where p = exp(z - lse), and lse is the logsumexp of the same operands. lse gets no cotangent of its own: the terms
through lse are part of dL/du. If lse were a separate, rounded number, the terms through lse would not cancel the others
when a token's class has nearly all of the probability.

    dL/da_i = z'_i,y_i        dL/dl_i = lse'_i        dL/dm_i = sum_j w_j z'_ij
    dL/du = l p (z' - lse') f' + d f'' u'                      f'' = d^2 z / du^2 = -2 logit_scale z / softcap^2 * f'
    dL/dinput = dL/du @ linear_weight + G @ linear_weight'
    dL/dlinear_weight = (dL/du).T @ input + G.T @ input'       dL/dlinear_bias = (dL/du).T @ 1

This operator has derivatives only by input', linear_weight' and bias', in which it is linear. Third derivatives are
refused with an error that names them.

**backward_tangent.** hvp and jvp differentiate a vector-Jacobian product by its vector. The derivative of
double_backward by its cotangents is the transposed map: from a direction in the backward operator's arguments to the
change of its results. Primes mark the direction, with a', l', m' for the cotangents, and the changes. The loop over
chunks is the same, with one more term in the change of G:

    p' = p (z' - sum_j p_j z'_j)      d' = l' p + l p' + m' w + a' [j = y]      G' = d' f' + d f'' u'

    grad_input' = G' @ linear_weight + G @ linear_weight'       grad_linear_weight' = G'.T @ input + G.T @ input'
    grad_linear_bias' = G'.T @ 1

(In the code every other prime is written `_dot`.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.options import Cotangents, LogitOptions
from ..math.shards import target_columns
from ..meta.arguments import DoubleBackward, GradGrads
from ..meta.outputs import Outputs, allocate
from .chunks import chunk_product, row_chunks, rows_per_chunk
from .logits import activate_with_slope, add_target_and_sum, apply_slope, at_columns, probabilities
from .row_statistics import weighted_logits
from .valid_tokens import kernel_of, on_valid_tokens

# N tokens, n rows of a chunk, D hidden, V vocabulary


@kernel_of(DoubleBackward)
def double_backward(call: DoubleBackward, outputs: Sequence[Tensor]) -> None:
    stream_rows(call, outputs[3:], None, call.grad_grads, outputs[:3])


def backward_tangent(call: DoubleBackward, direction: Sequence[Tensor | None]) -> Outputs:
    """The change of the backward operator's gradients, at the arguments of `call`. Does not read `call.grad_grads`.

    `direction` has an entry for each result of the double-backward operator.
    """
    of_gradients = slice(3, None)  # their places among the results of `call`
    out = allocate(call.results[of_gradients], call)
    changes = Cotangents(*direction[:3]), GradGrads(*direction[3:])
    on_valid_tokens(stream_rows, call, out, call.fills[of_gradients], *changes)
    return out


def stream_rows(
    call: DoubleBackward,
    out: Sequence[Tensor],  # three, in the order of meta.outputs.Gradients
    change: Cotangents | None,  # a', l', m'; None for double_backward
    direction: GradGrads,  # input', linear_weight', bias'
    numbers: Sequence[Tensor] | None = None,  # out: dL/da, dL/dl, dL/dm, (N,) each
) -> None:
    """Sums over chunks are kept in the accumulation dtype."""
    input, linear_weight, target, linear_bias, weight = call.operands
    dtype = call.lse.dtype
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    lse = torch.where(valid, call.lse, torch.inf)  # so p is 0 for ignored tokens
    cotangents = call.cotangents.masked(hit, valid, dtype).filled(call.lse)
    if change is not None:
        change = change.masked(hit, valid, dtype).filled(call.lse)
    along_input, along_weight, _ = direction
    weight_sum = torch.zeros_like(linear_weight, dtype=dtype)
    bias_sum = torch.zeros_like(out[2], dtype=dtype)
    # u', p and four temporaries of G'; with a softcap also the slope and one more
    matrices = 6 if call.logits.softcap is None else 8
    for rows in row_chunks(call, input, rows_per_chunk(input, linear_weight.shape[0], matrices=matrices)):
        x, options = input[rows], call.logits.of(rows)
        u_dot = change_of_logits(x, linear_weight, direction, rows, dtype)
        z, slope = activate_with_slope(chunk_product(x, linear_weight, linear_bias), options)
        p = probabilities(z, lse[rows], None if call.lse_rest is None else call.lse_rest[rows])
        # Normalised, so that p adds up to 1 within rounding. Without this, the terms of z'_iy - sum_j p_ij z'_ij would
        # not cancel if token i gives class y nearly all of the probability. The reason is that lse may come from
        # another GEMM, and then differs by 2e-4 at logits of 2000. (If a bias of -inf switches off all classes of a
        # shard, p is 0 there.)
        p.div_(p.sum(1, keepdim=True).clamp_min_(0.5))
        z_dot = u_dot if slope is None else u_dot * slope
        lse_dot = (p * z_dot).sum(1)
        if numbers is not None:
            of_target, of_lse, of_sum = numbers
            of_target[rows] = torch.where(hit[rows], at_columns(z_dot, column[rows], target), 0.0)
            of_lse[rows] = torch.where(valid[rows], lse_dot, 0.0)
            of_sum[rows] = torch.where(valid[rows], weighted_logits(z_dot, weight), 0.0)
        l = cotangents.grad_lse[rows, None]
        d, distance = p * l, z_dot - lse_dot[:, None]
        if change is None:
            d_dot = d * distance
        else:
            d_dot = p * (change.grad_lse[rows, None] + l * distance)
            add_target_and_sum(d_dot, column[rows], change.of(rows), weight)
        del distance
        grad_dot = apply_slope(d_dot, slope)
        add_target_and_sum(d, column[rows], cotangents.of(rows), weight)
        if call.logits.softcap is not None:
            grad_dot += d * u_dot * slope_derivative(z, slope, options)
        rounded, gradient = grad_dot.to(x.dtype), apply_slope(d, slope).to(x.dtype)
        if linear_bias is not None:
            bias_sum += (rounded if change is None else grad_dot).sum(0)
        out[0][rows] = rounded @ linear_weight
        weight_sum += rounded.T @ x
        if along_weight is not None:
            out[0][rows] += gradient @ along_weight
        if along_input is not None:
            weight_sum += gradient.T @ along_input[rows]
        # frees memory before the next chunk is allocated
        del u_dot, z, slope, p, z_dot, d, d_dot, grad_dot, rounded, gradient
    out[1].copy_(weight_sum)
    out[2].copy_(bias_sum)


def change_of_logits(
    input: Tensor, linear_weight: Tensor, direction: GradGrads, rows: slice, dtype: torch.dtype
) -> Tensor:  # u', (n, V)
    along_input, along_weight, along_bias = direction
    change = torch.zeros(input.shape[0], linear_weight.shape[0], dtype=dtype, device=input.device)
    if along_input is not None:
        change += chunk_product(along_input[rows], linear_weight)
    if along_weight is not None:
        change += chunk_product(input, along_weight)
    if along_bias is not None:
        change += along_bias.to(dtype)
    return change


def slope_derivative(z: Tensor, slope: Tensor, options: LogitOptions) -> Tensor:  # (n, V)
    """f'', the second derivative of the logits z by u under a softcap."""
    derivative = z * slope * (-2.0 / options.softcap**2)
    return derivative if options.logit_scale is None else derivative * options.logit_scale
