"""A logit_scale or temperature that is a 0-d tensor, such as CLIP's scale or a learnt temperature.

    z_ij = scale u_ij        scale = logit_scale / temperature        d loss / d scale = sum_ij G_ij u_ij / scale

The scale stays a tensor on its device. The inner operators multiply float32 products by it, as by a number, so hidden
states are not rounded again. They sum G_ij u_ij before the gradients are rounded.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..distributed.one_rank import any_dtensor
from ..math.options import Number, accumulation_dtype
from ..meta.checks import check_device
from ..support.holes import refuse_hole
from ..support.torch_private import check_value

# A scale of 0 is replaced by this number, because the gradient is divided by the scale.
TINY = 1e-20


def with_learnt_scale(op: str, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entry operator's arguments for those of a public function, of which logit_scale or temperature is a tensor.

    The tensor becomes `learnt_scale`, and a number that it replaces becomes 1.
    """
    rows = given["input" if "input" in given else "logits"]
    logit_scale, temperature, softcap = ((defaults | given)[n] for n in ("logit_scale", "temperature", "softcap"))
    if isinstance(temperature, Tensor):
        check_temperature(op, temperature, rows, softcap, "input" in given)
        logit_scale, temperature = logit_scale / temperature.to(accumulation_dtype(rows.dtype)), 1.0
    check_scale(op, "logit_scale", logit_scale, rows)
    scale = logit_scale.to(accumulation_dtype(rows.dtype))
    scale = torch.where(scale == 0.0, scale + TINY, scale)
    return {**given, "logit_scale": 1.0, "temperature": temperature, "learnt_scale": scale}


def check_temperature(op: str, temperature: Tensor, rows: Tensor, softcap: Number | None, of_head: bool) -> None:
    if temperature.numel() != 1:
        refuse_hole(op, "temperature of tokens")
    if op == "linear_kl_div" or not of_head:
        raise TypeError(
            f"{op}: expected temperature to be a number, got a tensor; no gradient is computed for temperature, so "
            "pass its value: temperature.item()"
        )
    check_scale(op, "temperature", temperature, rows)
    if softcap is not None:
        refuse_hole(op, "temperature and softcap")
    check_value(
        (temperature > 0.0) & (temperature < math.inf),
        f"{op}: expected temperature to be positive and finite, got a tensor that holds another number",
    )


def check_scale(op: str, name: str, scale: Tensor, rows: Tensor) -> None:
    if any_dtensor(scale):
        refuse_hole(op, "scale of DTensors", name=name)
    if scale.dim() != 0:
        hint = f"; pass {name}.reshape(())" if scale.numel() == 1 else ""
        raise ValueError(f"{op}: expected {name} to be a number or a 0-d tensor, got shape {tuple(scale.shape)}{hint}")
    if scale.is_complex() or scale.dtype == torch.bool:
        raise TypeError(f"{op}: expected {name} to be real, got {scale.dtype}")
    if scale.device.type != "cpu":
        check_device(op, rows, "input", **{name: scale})
