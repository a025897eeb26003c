"""Derivatives of the backward operator, in chunked ATen on every device: what create_graph=True and hessians reach.

With z, p, f' as in flce_ops/aten/logits.py, the backward operator computes from cotangents a, l, s

    d_ij = l_i p_ij + s_i w_j + a_i [j = y_i]      G = d f'      (G @ linear_weight, G.T @ input, G.T @ 1)

Let A (N, D), C (V, D), c (V,) be the cotangents of those three results. Then L = sum_ij G_ij H_ij with

    H = A @ linear_weight.T + input @ C.T + c            K = f' H

and, with p = exp(z - lse), where lse is the logsumexp of the same operands. It gets no cotangent of its own: what comes
through it stands in S. Apart, and rounded, it would not cancel the rest of S where a token is sure of its class.

    dL/da_i = K_i,y_i        dL/dl_i   = sum_j p_ij K_ij
    dL/ds_i = sum_j w_j K_ij
    S = dL/du = l p (K - sum_j p_ij K_ij) f' + d f'' H         f'' = d^2 z / du^2 = -2 logit_scale z / softcap^2 * f'
    dL/dinput = S @ linear_weight + G @ C      dL/dlinear_weight = S.T @ input + G.T @ A      dL/dlinear_bias = S.T @ 1

A, C and c alone have derivatives in turn (flce_ops/aten/backward_tangent.py): third derivatives are refused by name.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import chunk_product, row_chunks, rows_per_chunk
from flce_ops.aten.logits import (
    add_target_and_sum,
    apply_slope,
    chunk_logits_with_slope,
    probabilities,
    weighted_logits,
)
from flce_ops.math.options import LogitOptions
from flce_ops.math.shards import target_columns
from flce_ops.meta.arguments import DoubleBackward, takes

# N tokens, D hidden, V vocabulary


@takes(DoubleBackward)
def double_backward(call: DoubleBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.double_backward_outputs(call)
    out_target, out_lse_cotangent, out_sum, out_input, out_weight, out_bias = outputs
    input, linear_weight, target, linear_bias, weight = call.operands
    grad_grad_input, grad_grad_linear_weight, grad_grad_linear_bias = call.grad_grads
    lse, lse_rest, softcap = call.lse, call.lse_rest, call.logits.softcap
    valid, hit, column = target_columns(target, call.ignore_index, call.vocab_start, linear_weight.shape[0])
    cotangents = call.cotangents.kept(hit, valid, lse.dtype).filled(lse)
    weight_sum_over_chunks = torch.zeros_like(linear_weight, dtype=lse.dtype)
    bias_sum_over_chunks = torch.zeros_like(out_bias, dtype=lse.dtype)

    # h, p, k, d, grad_u and one on the way there; with a softcap slope and one more
    step = rows_per_chunk(input, linear_weight.shape[0], matrices=6 if softcap is None else 8)
    for rows in row_chunks("linear_cross_entropy_double_backward", input, step):
        x = input[rows]
        h = torch.zeros(x.shape[0], linear_weight.shape[0], dtype=lse.dtype, device=x.device)
        if grad_grad_input is not None:
            h += chunk_product(grad_grad_input[rows], linear_weight)
        if grad_grad_linear_weight is not None:
            h += chunk_product(x, grad_grad_linear_weight)
        if grad_grad_linear_bias is not None:
            h += grad_grad_linear_bias.to(lse.dtype)

        z, slope = chunk_logits_with_slope(x, linear_weight, linear_bias, call.logits)
        p = normalized(probabilities(z, lse[rows], None if lse_rest is None else lse_rest[rows]))
        k = h if slope is None else h * slope
        pk = (p * k).sum(1)
        out_target[rows] = torch.where(hit[rows], k.gather(1, column[rows]).squeeze(1), 0.0)
        out_lse_cotangent[rows] = torch.where(valid[rows], pk, 0.0)
        out_sum[rows] = torch.where(valid[rows], weighted_logits(k, weight), 0.0)

        d = p * cotangents.grad_lse[rows, None]
        grad_u = apply_slope(d * (k - pk[:, None]), slope)
        add_target_and_sum(d, column[rows], cotangents.of(rows), weight)
        if softcap is not None:
            grad_u += d * h * slope_derivative(z, slope, call.logits)
        grad_logits = apply_slope(d, slope).to(x.dtype)
        grad_u = grad_u.to(x.dtype)
        out_input[rows] = grad_u @ linear_weight
        weight_sum_over_chunks += grad_u.T @ x
        bias_sum_over_chunks += grad_u.sum(0) if linear_bias is not None else 0.0
        if grad_grad_linear_weight is not None:
            out_input[rows] += grad_logits @ grad_grad_linear_weight
        if grad_grad_input is not None:
            weight_sum_over_chunks += grad_logits.T @ grad_grad_input[rows]
        del h, z, slope, p, k, d, grad_u, grad_logits  # before the next chunk's are allocated
    out_weight.copy_(weight_sum_over_chunks)
    out_bias.copy_(bias_sum_over_chunks)
    return outputs


def normalized(p: Tensor) -> Tensor:  # (n, V), in place
    """Probabilities that add up to 1 within a rounding, so that K_iy - sum_j p_ij K_ij cancels where token i is sure of
    y: their lse may come from another GEMM, off by 2e-4 at logits of 2000. (A shard whose classes a bias of -inf
    switches off has none.)
    """
    return p.div_(p.sum(1, keepdim=True).clamp_min_(0.5))


def slope_derivative(z: Tensor, slope: Tensor, options: LogitOptions) -> Tensor:  # (n, V)
    """f'' of capped logits."""
    derivative = z * slope * (-2.0 / options.softcap**2)
    return derivative if options.logit_scale is None else derivative * options.logit_scale
