"""A temperature for each token, for training on a batch whose completions were sampled at several temperatures.

    z_ij = softcap tanh(logit_scale u_ij / softcap) / temperature_i

The kernels divide the logits when they compute them, in float32 for bfloat16 and float16 operands. Hidden states are
not scaled. The inner operators get a logit_scale (and a softcap) for each token instead of a temperature. If all
temperatures are equal, the results have the bits that one number would give.

A logit_scale or temperature that is a tensor without dimensions may get a gradient, such as CLIP's scale or a learnt
temperature:

    s (input @ linear_weight.T + linear_bias) = (s input) @ linear_weight.T + s linear_bias

So this file multiplies input (..., D) and linear_bias (V,) by the scale and rounds them to their dtype once, and the
inner operators get no scale. A scale that is a number stays a number, which the kernels apply in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..math.options import Number, accumulation_dtype
from ..meta.checks import check_device
from ..support.dtensors import any_dtensor
from ..support.holes import refuse_hole
from ..support.torch_private import check_value, forward_mode_is_active

# N tokens


def as_argument(op: str, temperature: Tensor, source: str) -> dict[str, Any]:
    """The entry operator's arguments for a `temperature` that is a tensor. A tensor without dimensions stays the
    argument `temperature`, because it may get a gradient.
    """
    if temperature.dim() > 0:
        refuse_hole(op, "temperature of tokens")
    if op == "linear_kl_div" or source == "logits":
        raise TypeError(
            f"{op}: expected temperature to be a number, got a tensor; no gradient is computed for temperature, so "
            "pass its value: temperature.item()"
        )
    return {}


def apply_learnt_scale(
    op: str,
    input: Tensor,  # (..., D)
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Number | Tensor,
    temperature: Number | Tensor,
    softcap: Number | None,
) -> tuple[Tensor, Tensor | None, Number, Number]:
    """Returns the scaled input and linear_bias, and the logit_scale and temperature that remain for the operator."""
    if isinstance(temperature, Tensor):
        check_scale(op, "temperature", temperature, input)
        if softcap is not None:
            refuse_hole(op, "temperature and softcap")
        check_value(
            (temperature > 0.0) & (temperature < math.inf),
            f"{op}: expected temperature to be positive and finite, got a tensor that holds another number",
        )
        logit_scale, temperature = logit_scale / temperature.to(accumulation_dtype(input.dtype)), 1.0
    if isinstance(logit_scale, Tensor):
        check_scale(op, "logit_scale", logit_scale, input)
        check_device(op, input, linear_bias=linear_bias)
        input = scaled(input, logit_scale)
        linear_bias = None if linear_bias is None else scaled(linear_bias.unsqueeze(-1), logit_scale).squeeze(-1)
        logit_scale = 1.0
    return input, linear_bias, logit_scale, temperature


def scaled(rows: Tensor, scale: Tensor) -> Tensor:  # (..., D), () -> (..., D)
    learnt = scale.requires_grad and torch.is_grad_enabled()
    return Scaled.apply(rows, scale) if learnt and not forward_mode_is_active() else rows * scale


class Scaled(Function):
    """rows * scale. Rows that are not finite and whose gradient is 0 are left out of the scale's gradient, where 0
    times the row would be nan.

    Such rows belong to ignored tokens, which may hold anything, or to classes that a bias of -inf switches off. A valid
    row with nan has a gradient of nan, and finite rows keep their part of the derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, scale: Tensor) -> Tensor:
        return rows * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, scale = ctx.saved_tensors
        left_out = ~grad.any(-1, keepdim=True) & ~rows.isfinite().all(-1, keepdim=True)
        products = grad * torch.where(left_out, 0.0, rows)
        of_scale = products.sum(dtype=accumulation_dtype(rows.dtype)).to(scale.dtype)
        return grad * scale if ctx.needs_input_grad[0] else None, of_scale


def check_scale(op: str, name: str, scale: Tensor, input: Tensor) -> None:
    if any_dtensor(scale, input):
        refuse_hole(op, "scale of DTensors", name=name)
    if scale.dim() != 0:
        raise ValueError(f"{op}: expected {name} to be a number or a 0-d tensor, got shape {tuple(scale.shape)}")
    if scale.is_complex() or scale.dtype == torch.bool:
        raise TypeError(f"{op}: expected {name} to be real, got {scale.dtype}")
    if scale.device.type != "cpu":
        check_device(op, input, "input", **{name: scale})
