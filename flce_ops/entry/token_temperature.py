"""A temperature for each token, for training on a batch whose completions were sampled at several temperatures.

    z_ij = softcap tanh(logit_scale u_ij / softcap) / temperature_i

The kernels divide the logits when they compute them, in float32 for bfloat16 and float16 operands. Hidden states are
not scaled. The inner operators get a logit_scale (and a softcap) for each token instead of a temperature. If all
temperatures are equal, the results have the bits that one number would give.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..distributed.one_rank import OneRank
from ..math.topk import tokens_that_count
from ..meta.checks import check_dense, check_device, check_real
from ..support.holes import refuse_hole
from ..support.torch_private import check_value, has_tangent
from .arguments import check_shape

# N tokens


def as_argument(op: str, temperature: Tensor, source: str) -> dict[str, Any]:
    """The entry operator's arguments for a `temperature` that is a tensor. A tensor without dimensions stays the
    argument `temperature`, because it may get a gradient.
    """
    if temperature.dim() > 0:
        return {"temperature": 1.0, "token_temperature": temperature}
    if op == "linear_kl_div" or source == "logits":
        raise TypeError(
            f"{op}: expected temperature to be a number, got a tensor; no gradient is computed for temperature, so "
            "pass its value: temperature.item()"
        )
    return {}


def temperature_of_tokens(
    op: str,
    call: Any,
    layout: OneRank,
    target: Tensor | None,  # (N,) or (N, K) of this rank; None if all tokens are valid
) -> Tensor | None:  # (N,) of this rank; 1 at tokens that are not valid, whose number may be anything
    temperature: Tensor | None = call.token_temperature
    if temperature is None:
        return None
    rows = getattr(call, call.fields[0][0])  # (..., D) or (..., V)
    check_dense(op, temperature=temperature)
    check_real(op, temperature=temperature)
    check_device(op, rows, call.fields[0][0], temperature=temperature)
    check_shape(op, "temperature", temperature, rows.shape[:-1], "a number, or one number per token, got")
    if (temperature.requires_grad and torch.is_grad_enabled()) or has_tangent(temperature):
        refuse_hole(op, "temperature of tokens")
    own = layout.per_token(temperature)
    assert own is not None
    if target is not None:
        own = torch.where(tokens_that_count(target, call.ignore_index), own, 1.0)
    check_value(
        ((own > 0.0) & (own < math.inf)).all(),
        f"{op}: expected temperature to be positive and finite, got a tensor that holds another number",
    )
    return own
