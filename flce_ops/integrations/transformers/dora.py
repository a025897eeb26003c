"""What DoRA multiplies the logits of a class with, of PEFT's adapter:

    logits_j = c_j (x . W_j + h . B_j) + b_j        c_j = m_j / ||W_j + s (B A)_j||        h = s x A^T

The norm is a constant to the gradients, as in PEFT, and made without the merged weight:

    ||W_j + s (B A)_j||^2 = ||W_j||^2 + 2 s B_j . (W A^T)_j + s^2 B_j (A A^T) B_j^T
"""

import sys
from typing import Any

import torch
from torch import Tensor

from flce_ops.aten.chunks import chunk_product
from flce_ops.math.precision import accumulation_dtype
from flce_ops.support.torch_private import hooks_on_the_output

# D hidden, V vocabulary, r rank of the adapter


def is_dora(variant: object) -> bool:
    """PEFT's own, and nothing that derives from it."""
    variants = sys.modules.get("peft.tuners.lora.variants")
    return variants is not None and type(variant) is variants.DoraLinearVariant


def why_not_a_scale(head: Any, adapter: str, active: list[str]) -> str | None:
    """What a DoRA adapter of the head does that is no factor of each class."""
    if adapter not in active:
        return None
    if len(active) > 1:
        return "a DoRA adapter active beside another; alone it goes"
    if head.training and not isinstance(head.lora_dropout[adapter], torch.nn.Identity):
        # its own product with the head's weight is then one of other inputs
        return "a DoRA adapter that trains with lora_dropout; with lora_dropout=0 it goes"
    if any(hooks_on_the_output(head.lora_magnitude_vector[adapter])):
        return "a DoRA adapter with a hook on its magnitudes"
    return None


def class_scale(head: Any, adapter: str) -> Tensor:  # (V,)
    magnitude = head.lora_magnitude_vector[adapter].weight
    down, up = head.lora_A[adapter].weight, head.lora_B[adapter].weight
    return magnitude / merged_norms(head.base_layer.weight, down, up, head.scaling[adapter])


@torch.no_grad()
def merged_norms(
    linear_weight: Tensor,  # (V, D)
    down: Tensor,  # (r, D), A
    up: Tensor,  # (V, r), B
    scaling: float,
) -> Tensor:  # (V,) in the accumulation dtype
    dtype = accumulation_dtype(linear_weight.dtype)
    of_weight = torch.linalg.vector_norm(linear_weight, dim=1, dtype=dtype).square()
    cross = chunk_product(linear_weight, down.to(linear_weight.dtype)).to(dtype)  # (V, r), W A^T
    a, b = down.to(dtype), scaling * up.to(dtype)
    return (of_weight + (b * (2.0 * cross + b @ (a @ a.T))).sum(1)).sqrt()
