"""Floating-point operations of each inner operator for torch.utils.flop_counter: GEMM passes of 2 N D V.

Elementwise work over the logits is left out, as the counter does for ATen's softmax.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from flce_ops.ops import registration as registration

# N tokens, D hidden, V vocabulary; shapes arrive in place of tensors


def gemm_pass(input_shape: torch.Size, weight_shape: torch.Size) -> int:
    tokens, hidden = input_shape
    return 2 * tokens * hidden * weight_shape[0]


@register_flop_formula(torch.ops.flce.linear_cross_entropy_forward)
def forward_flops(input_shape, weight_shape, *args, out_shape=None, **options) -> int:
    return gemm_pass(input_shape, weight_shape)


@register_flop_formula(torch.ops.flce.linear_cross_entropy_backward)
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


@register_flop_formula(torch.ops.flce.linear_cross_entropy_with_grad)
def with_grad_flops(input_shape, weight_shape, *args, output_mask, out_shape=None, **options) -> int:
    return gemm_pass(input_shape, weight_shape) * (1 + output_mask[0] + output_mask[1])


@register_flop_formula(torch.ops.flce.linear_cross_entropy_double_backward)
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


register_flop_formula(torch.ops.flce.linear_cross_entropy_vocab_parallel_with_grad, get_raw=True)(
    with_grad_flops
)  # takes shapes already


def both_logits(input, linear_weight, linear_bias, teacher_input, teacher_weight, *args) -> int:
    """GEMM passes of the student's and, unless probabilities are given, the teacher's logits; shapes for tensors."""
    teacher = 0 if teacher_input is None else gemm_pass(teacher_input, teacher_weight)
    return gemm_pass(input, linear_weight) + teacher


def gradient_passes(input, linear_weight, output_mask) -> int:
    return gemm_pass(input, linear_weight) * (output_mask[0] + output_mask[1])


@register_flop_formula(torch.ops.flce.linear_kl_div_forward)
def kl_div_forward_flops(*shapes, out_shape=None, **options) -> int:
    return both_logits(*shapes)


@register_flop_formula(torch.ops.flce.linear_kl_div_with_grad)
def kl_div_with_grad_flops(*shapes, output_mask, out_shape=None, **options) -> int:
    return both_logits(*shapes) + gradient_passes(shapes[0], shapes[1], output_mask)


@register_flop_formula(torch.ops.flce.linear_kl_div_backward)
def kl_div_backward_flops(grad, *shapes, output_mask, out_shape=None, **options) -> int:
    return both_logits(*shapes) + gradient_passes(shapes[0], shapes[1], output_mask)
