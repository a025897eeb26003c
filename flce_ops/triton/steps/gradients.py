"""Which gradients a step makes, the input's gradient of a chunk, and how gradients are finished after all chunks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..gemm.backends import backend_for
from ..gemm.class_blocks import EVERY_BLOCK, ClassBlocks
from ..gemm.input_gradient import Finish
from ..gemm.split_k import products_of_ranges
from ..rows.copy_rows import launch_spread_rows
from ..rows.valid_tokens import ValidTokens
from .chunks import MULTIPLE, slices

# N tokens, n rows of a chunk, D hidden, V vocabulary


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


def write_input_gradient(
    out: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    exponentials: Tensor,  # (n, V)
    finish: Finish,
    valid_tokens: ValidTokens,
    memory: Tensor,  # flat float32
    *,
    blocks: ClassBlocks = EVERY_BLOCK,
    by_ranges: bool = False,
) -> None:
    """grad_input of a chunk. The product of several slices or ranges waits in float32: in `memory`, or in a new buffer
    if `memory` is too small. If it does not hold the products of all rows, rows are processed in groups.
    """
    waiting = products_of_ranges(linear_weight.shape[0]) if by_ranges else 0
    of_row, at_once = waiting * out.shape[1], out.shape[0]
    if waiting:
        memory = memory if memory.shape[0] >= MULTIPLE * of_row else memory.new_empty(MULTIPLE * of_row)
        at_once = memory.shape[0] // of_row // MULTIPLE * MULTIPLE
    for rows in slices(out.shape[0], at_once):
        of_rows = finish.of(rows), valid_tokens.of(rows), memory, blocks, by_ranges
        gradient = backend_for(out).input_gradient(out[rows], linear_weight, *of_rows)
        gradient.add(exponentials[rows])
        gradient.close()


def finish_gradients(grads: Sequence[Tensor], gradients: Gradients, valid_tokens: ValidTokens, place: Tensor) -> None:
    """Rounds the bias's sum into its result, and moves rows of grad_input to their tokens' places."""
    if gradients.bias_sum is not None:
        grads[2].copy_(gradients.bias_sum)
    if gradients.input is not None:
        launch_spread_rows(gradients.input, valid_tokens, place)
