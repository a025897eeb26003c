"""Which gradients a step makes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# N tokens, D hidden, V vocabulary


class Gradients(NamedTuple):
    """None where not asked for."""

    input: Tensor | None  # (N, D), written
    linear_weight: Tensor | None  # (V, D), written
    bias_sum: Tensor | None  # (V,) float32, added to


def wanted_gradients(grads: Sequence[Tensor], output_mask: list[bool]) -> Gradients:
    """Of grad_input, grad_linear_weight and grad_linear_bias. The bias is summed apart from its result."""
    grad_input, grad_weight, grad_bias = (grad if wanted else None for grad, wanted in zip(grads, output_mask))
    bias_sum = None if grad_bias is None else torch.zeros_like(grad_bias, dtype=torch.float32)
    return Gradients(grad_input, grad_weight, bias_sum)
