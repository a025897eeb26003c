"""Floating-point operations of each inner operator for torch.utils.flop_counter: GEMM passes of 2 N D V.

Elementwise work over the logits is left out, as the counter does for ATen's softmax.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from flce_ops.ops import registration as ops

# N tokens, D hidden, V vocabulary; shapes arrive in place of tensors


def gemm_pass(input_shape: torch.Size, weight_shape: torch.Size) -> int:
    tokens, hidden = input_shape
    return 2 * tokens * hidden * weight_shape[0]


@register_flop_formula(ops.linear_cross_entropy_forward.overloadpacket)
def forward_flops(input_shape, weight_shape, *args, out_shape=None, **options) -> int:
    return gemm_pass(input_shape, weight_shape)


@register_flop_formula(ops.linear_cross_entropy_backward.overloadpacket)
def backward_flops(
    grad_target_logit,
    grad_lse,
    grad_logit_sum,
    input_shape,
    weight_shape,
    *args,
    output_mask,
    out_shape=None,
    **options,
) -> int:
    """The logits again, then one pass for each matrix gradient."""
    return gemm_pass(input_shape, weight_shape) * (1 + output_mask[0] + output_mask[1])


@register_flop_formula(ops.linear_cross_entropy_with_grad.overloadpacket)
def with_grad_flops(input_shape, weight_shape, *args, output_mask, out_shape=None, **options) -> int:
    return gemm_pass(input_shape, weight_shape) * (1 + output_mask[0] + output_mask[1])


@register_flop_formula(ops.linear_cross_entropy_double_backward.overloadpacket)
def double_backward_flops(
    grad_grad_input,
    grad_grad_linear_weight,
    grad_grad_linear_bias,
    a,
    l,
    s,
    input_shape,
    weight_shape,
    *args,
    **options,
) -> int:
    """Logits, S @ W and S.T @ X; H and two more products for each of the first two cotangents present."""
    cotangents = (grad_grad_input is not None) + (grad_grad_linear_weight is not None)
    return gemm_pass(input_shape, weight_shape) * (3 + 2 * cotangents)
