"""A frozen head whose linear_weight is quantized. The logits come from one slice of classes at a time, which is
dequantized.

take_quantized_head replaces linear_weight by a tensor that has the dense weight's shape and no data. Checks, layouts
and reductions need only that shape. flce_ops/distributed/class_slices.py computes the numbers of the rows from the
slices.
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
    """Whether slices of the weight can be dequantized. Other quantized weights are refused later, by the check for
    dense tensors.
    """
    state = packed_state(weight)
    if state is not None:
        return len(state.shape) == 2
    if not is_quantized(weight) or weight.dim() != 2 or hasattr(weight, "get_original_weight"):
        return False
    if weight.is_quantized:  # torch's own: slices of those with a scale for each class are wrong or fail
        return weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    try:
        weight[:1].dequantize()
    except Exception:  # a subclass may raise any error for a slice
        return False
    return True
