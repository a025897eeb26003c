"""Derivatives of the backward operator, in chunked ATen on every device: what create_graph=True and hessians need.

With z, p, f' as in flce_ops/aten/logits.py, the backward operator computes, from cotangents a, l, m,

    d_ij = l_i p_ij + m_i w_j + a_i [j = y_i]      G = d f'      (G @ linear_weight, G.T @ input, G.T @ 1)

Let input', linear_weight' and bias' be the cotangents of those three results. Then L = sum_ij G_ij u'_ij with

    u' = input' @ linear_weight.T + input @ linear_weight'.T + bias'      z' = f' u'      lse'_i = sum_j p_ij z'_ij

where p = exp(z - lse), and lse is the logsumexp of the same operands. lse gets no cotangent of its own: the terms
through lse are part of dL/du. If lse were a separate, rounded number, the terms through lse would not cancel the others
when a token's class has nearly all of the probability.

    dL/da_i = z'_i,y_i        dL/dl_i = lse'_i        dL/dm_i = sum_j w_j z'_ij
    dL/du = l p (z' - lse') f' + d f'' u'                      f'' = d^2 z / du^2 = -2 logit_scale z / softcap^2 * f'
    dL/dinput = dL/du @ linear_weight + G @ linear_weight'
    dL/dlinear_weight = (dL/du).T @ input + G.T @ input'       dL/dlinear_bias = (dL/du).T @ 1

This operator has derivatives only by input', linear_weight' and bias' (flce_ops/aten/backward_tangent.py). Third
derivatives are refused with an error that names them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..math.shards import target_columns
from ..meta.arguments import DoubleBackward
from .logits import add_target_and_sum, apply_slope, at_columns
from .row_statistics import weighted_logits
from .second_order import SecondOrder, slope_derivative
from .valid_tokens import kernel_of

# N tokens, D hidden, V vocabulary


@kernel_of(DoubleBackward)
def double_backward(call: DoubleBackward, outputs: Sequence[Tensor]) -> None:
    out_target, out_lse_cotangent, out_sum, *out = outputs
    input, linear_weight, target, _, weight = call.operands
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    cotangents = call.cotangents.masked(hit, valid, call.lse.dtype).filled(call.lse)
    sums = SecondOrder(call, call.grad_grads, out)
    for rows in sums.chunks():
        u_dot = sums.change_of_logits(rows)
        z, slope, p = sums.logits(rows)
        z_dot = u_dot if slope is None else u_dot * slope
        lse_dot = (p * z_dot).sum(1)
        out_target[rows] = torch.where(hit[rows], at_columns(z_dot, column[rows], target), 0.0)
        out_lse_cotangent[rows] = torch.where(valid[rows], lse_dot, 0.0)
        out_sum[rows] = torch.where(valid[rows], weighted_logits(z_dot, weight), 0.0)

        d = p * cotangents.grad_lse[rows, None]
        grad_u = apply_slope(d * (z_dot - lse_dot[:, None]), slope)
        add_target_and_sum(d, column[rows], cotangents.of(rows), weight)
        if call.logits.softcap is not None:
            grad_u += d * u_dot * slope_derivative(z, slope, call.logits.of(rows))
        sums.add(rows, grad_u.to(input.dtype), apply_slope(d, slope))
        del u_dot, z, slope, p, z_dot, d, grad_u  # frees memory before the next chunk is allocated
    sums.finish()
