"""A logit_scale or temperature that is a tensor (CLIP's scale, a learnt temperature): it gets its gradient.

    s (input @ linear_weight.T + linear_bias) = (s input) @ linear_weight.T + s linear_bias

so it goes to the operands of size (..., D) and (V,) by ordinary differentiable multiplication, once rounded to their
dtype, and the operators need not know it. A number stays a number, which the kernels apply in float32.
"""

from torch import Tensor

from flce_ops.math.scalars import Number
from flce_ops.meta.checks import check_device
from flce_ops.support.dtensor import any_dtensor


def apply_learnt_scale(
    op: str,
    input: Tensor,  # (..., D)
    linear_bias: Tensor | None,  # (V,)
    logit_scale: Number | Tensor,
    temperature: Number | Tensor,
    softcap: Number | None,
) -> tuple[Tensor, Tensor | None, Number, Number]:
    """Scaled input and linear_bias; the logit_scale and temperature that are left to the operator."""
    if isinstance(temperature, Tensor):
        check_scale(op, "temperature", temperature, input)
        if softcap is not None:
            raise NotImplementedError(
                f"{op}: a tensor as temperature is not implemented together with softcap, behind which it divides; "
                "pass temperature as a number"
            )
        logit_scale, temperature = logit_scale / temperature, 1.0
    if isinstance(logit_scale, Tensor):
        check_scale(op, "logit_scale", logit_scale, input)
        check_device(op, input, linear_bias=linear_bias)
        input = input * logit_scale
        linear_bias = None if linear_bias is None else linear_bias * logit_scale
        logit_scale = 1.0
    return input, linear_bias, logit_scale, temperature


def check_scale(op: str, name: str, scale: Tensor, input: Tensor) -> None:
    if any_dtensor(scale, input):
        raise NotImplementedError(
            f"{op}: a tensor as {name} is not implemented beside DTensors; pass a number, or multiply the hidden "
            "states by it before the head"
        )
    if scale.dim() != 0:
        raise ValueError(f"{op}: expected {name} to be a number or a 0-d tensor, got shape {tuple(scale.shape)}")
    if scale.is_complex():
        raise TypeError(f"{op}: expected {name} to be real, got {scale.dtype}")
    if scale.device.type != "cpu":
        check_device(op, input, "input", **{name: scale})
