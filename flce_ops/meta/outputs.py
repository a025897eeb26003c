"""Uninitialised results of each inner operator, after its checks."""

import torch
from torch import Tensor

from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.checks import check_operands

# N tokens, D hidden, V vocabulary


def forward_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    logit_sum: bool = False,
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    vocab_start: int = 0,
    vocab_size: int | None = None,
    expected_logit: bool = False,
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """target_logit, lse, logit_sum, expected_logit, max_logit, argmax, lse_rest: (N,), or (0,) if not asked for."""
    check_operands("linear_cross_entropy_forward", input, linear_weight, target, linear_bias, weight)
    per_token = {"dtype": accumulation_dtype(input.dtype)}
    rows = input.shape[0]
    return (
        input.new_empty(rows, **per_token),
        input.new_empty(rows, **per_token),
        input.new_empty(rows if logit_sum else 0, **per_token),
        input.new_empty(rows if expected_logit else 0, **per_token),
        input.new_empty(rows if argmax else 0, **per_token),
        input.new_empty(rows if argmax else 0, dtype=torch.int64),
        input.new_empty(rows, **per_token),
    )


def backward_outputs(
    grad_target_logit: Tensor | None,
    grad_lse: Tensor | None,
    grad_logit_sum: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int = -100,
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    vocab_start: int = 0,
    output_mask: list[bool],
    grad_expected_logit: Tensor | None = None,
    expected_logit: Tensor | None = None,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_input (N, D), grad_linear_weight (V, D), grad_linear_bias (V,); (0,) where `output_mask` is False."""
    op = "linear_cross_entropy_backward"
    check_operands(op, input, linear_weight, target, linear_bias, weight)
    if (grad_expected_logit is None) != (expected_logit is None):
        raise ValueError(f"{op}: expected grad_expected_logit and expected_logit together, got one of them")
    per_token = {
        "grad_target_logit": grad_target_logit,
        "grad_lse": grad_lse,
        "grad_logit_sum": grad_logit_sum,
        "lse": lse,
        "grad_expected_logit": grad_expected_logit,
        "expected_logit": expected_logit,
        "lse_rest": lse_rest,
    }
    for name, tensor in per_token.items():
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != input.shape[0]):
            raise ValueError(f"{op}: expected {name} of shape ({input.shape[0]},), got {tuple(tensor.shape)}")
    return gradient_outputs(input, linear_weight, linear_bias, output_mask)


def with_grad_outputs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    row_scale: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: Tensor | None = None,  # ()
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    output_mask: list[bool],
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss (), losses (N,), the three gradients as of `backward_outputs`, argmax (N,) or (0,)."""
    op = "linear_cross_entropy_with_grad"
    check_operands(op, input, linear_weight, target, linear_bias, weight)
    if row_scale.dim() != 1 or row_scale.shape[0] != input.shape[0]:
        raise ValueError(f"{op}: expected row_scale of shape ({input.shape[0]},), got {tuple(row_scale.shape)}")
    per_token = {"dtype": accumulation_dtype(input.dtype)}
    return (
        input.new_empty((), **per_token),
        input.new_empty(input.shape[0], **per_token),
        *gradient_outputs(input, linear_weight, linear_bias, output_mask),
        input.new_empty(input.shape[0] if argmax else 0, dtype=torch.int64),
    )


def gradient_outputs(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    want_input, want_weight, want_bias = output_mask
    return (
        input.new_empty(input.shape if want_input else (0,)),
        linear_weight.new_empty(linear_weight.shape if want_weight else (0,)),
        linear_weight.new_empty(linear_weight.shape[0] if want_bias else 0),
    )


def double_backward_outputs(
    grad_grad_input: Tensor | None,
    grad_grad_linear_weight: Tensor | None,
    grad_grad_linear_bias: Tensor | None,
    grad_target_logit: Tensor | None,
    grad_lse: Tensor | None,
    grad_logit_sum: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int = -100,
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    vocab_start: int = 0,
    lse_rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of grad_target_logit, grad_lse, grad_logit_sum (N,) each, input, linear_weight, linear_bias."""
    op = "linear_cross_entropy_double_backward"
    check_operands(op, input, linear_weight, target, linear_bias, weight)
    cotangents = {
        "grad_grad_input": (grad_grad_input, input),
        "grad_grad_linear_weight": (grad_grad_linear_weight, linear_weight),
    }
    for name, (tensor, like) in cotangents.items():
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f"{op}: expected {name} of shape {tuple(like.shape)}, got {tuple(tensor.shape)}")
    per_token = {"dtype": accumulation_dtype(input.dtype)}
    rows = input.shape[0]
    per_row = tuple(input.new_empty(rows, **per_token) for _ in range(3))
    return (*per_row, *gradient_outputs(input, linear_weight, linear_bias, [True, True, linear_bias is not None]))


def vocab_parallel_with_grad_outputs(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight, row_scale, **options
):
    """Fake kernel, and allocation of the others. `weight` has all V classes, the other operands v."""
    wanted = {"output_mask": options["output_mask"], "argmax": options.get("argmax", False)}
    return with_grad_outputs(input, linear_weight, target, linear_bias, None, row_scale, **wanted)
