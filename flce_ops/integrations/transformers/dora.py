"""The factor of each class by which PEFT's DoRA adapter multiplies the logits:

    logits_j = c_j (x . W_j + h . B_j) + b_j        c_j = m_j / ||W_j + s (B A)_j||        h = s x A^T

The norm is a constant for the gradients, as in PEFT. It is computed without the merged weight
(flce_ops/aten/row_norms.py).
"""

import sys
from typing import Any

import torch
from torch import Tensor

from ...aten.row_norms import merged_row_norms
from ...support.torch_private import hooks_on_the_output

# V vocabulary


def is_dora(variant: object) -> bool:
    """Whether this is PEFT's own class, and not a subclass."""
    variants = sys.modules.get("peft.tuners.lora.variants")
    return variants is not None and type(variant) is variants.DoraLinearVariant


def why_not_a_scale(head: Any, adapter: str, active: list[str]) -> str | None:
    """Why a DoRA adapter of the head cannot be used as a factor for each class; None if it can."""
    if adapter not in active:
        return None
    if len(active) > 1:
        return "a DoRA adapter active beside another; alone it goes"
    if head.training and not isinstance(head.lora_dropout[adapter], torch.nn.Identity):
        # the head's weight and the adapter would then be multiplied with different inputs
        return "a DoRA adapter that trains with lora_dropout; with lora_dropout=0 it goes"
    if any(hooks_on_the_output(head.lora_magnitude_vector[adapter])):
        return "a DoRA adapter with a hook on its magnitudes"
    return None


def class_scale(head: Any, adapter: str) -> Tensor:  # (V,)
    magnitude = head.lora_magnitude_vector[adapter].weight
    down, up = head.lora_A[adapter].weight, head.lora_B[adapter].weight
    return magnitude / merged_row_norms(head.base_layer.weight, down, up, head.scaling[adapter])
