"""Which gradients a step makes, and how they are finished after all chunks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows.copy_rows import launch_spread_rows
from ..rows.valid_tokens import ValidTokens

# N tokens, D hidden, V vocabulary


class Gradients(NamedTuple):
    """None if not requested."""

    input: Tensor | None  # (N, D), written
    linear_weight: Tensor | None  # (V, D), written
    bias_sum: Tensor | None  # (V,) float32, added to


def wanted_gradients(grads: Sequence[Tensor], output_mask: list[bool]) -> Gradients:
    """From (grad_input, grad_linear_weight, grad_linear_bias). The bias gradient is summed in a float32 buffer of its
    own.
    """
    grad_input, grad_weight, grad_bias = (grad if wanted else None for grad, wanted in zip(grads, output_mask))
    bias_sum = None if grad_bias is None else grad_bias.new_zeros(grad_bias.shape, dtype=torch.float32)
    return Gradients(grad_input, grad_weight, bias_sum)


def finish_gradients(grads: Sequence[Tensor], gradients: Gradients, valid_tokens: ValidTokens, place: Tensor) -> None:
    """Rounds the bias's sum into its result, and moves rows of grad_input to their tokens' places."""
    if gradients.bias_sum is not None:
        grads[2].copy_(gradients.bias_sum)
    if gradients.input is not None:
        launch_spread_rows(gradients.input, valid_tokens, place)
