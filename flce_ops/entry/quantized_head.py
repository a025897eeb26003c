"""A frozen head whose linear_weight is quantized: its slices of classes are the source of the logits.

From here on linear_weight is a tensor of the dense weight's shape without its numbers. Checks, layouts and reductions
read that shape, and flce_ops/distributed/class_slices.py makes the rows.
"""

from typing import cast

import torch
from torch import Tensor

from ..meta.checks import DENSE_TYPES, is_quantized
from ..ops.autocast import autocast_operands
from ..ops.call_facts import needs_gradient
from ..support.holes import refuse_hole
from ..support.quantized import QuantizedHead, packed_state
from .arguments import OP
from .refusals import features_of, refuse
from .schemas import CrossEntropy


def take_quantized_head(call: CrossEntropy) -> QuantizedHead | None:
    weight = call.linear_weight
    if (type(weight) in DENSE_TYPES and not weight.is_quantized) or not has_slices(weight):
        return None
    refuse(OP, call, features_of(call) | {"a quantized head"})
    if needs_gradient(weight):
        refuse_hole(OP, "constant", name="linear_weight")
    head = QuantizedHead(weight)
    like = cast(Tensor, autocast_operands(call.input.device.type, call.input.new_empty(0))[0])
    call.linear_weight = head.like(like.dtype)
    return head


def has_slices(weight: Tensor) -> bool:
    """Others are refused later, as what is not dense."""
    state = packed_state(weight)
    if state is not None:
        return len(state.shape) == 2
    if not is_quantized(weight) or weight.dim() != 2 or hasattr(weight, "get_original_weight"):
        return False
    if weight.is_quantized:  # torch's own, whose slices of classes with a scale each are wrong or missing
        return weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    try:
        weight[:1].dequantize()
    except Exception:  # whatever its dispatch says of a slice
        return False
    return True
