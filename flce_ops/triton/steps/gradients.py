"""Which gradients a step makes, the input's gradient of a chunk, and how gradients are finished after all chunks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...support.integers import cdiv
from ..gemm.backends import backend_for
from ..gemm.class_blocks import EVERY_BLOCK, ClassBlocks
from ..gemm.input_gradient import SUMMED, Finish
from ..gemm.split_k import products_of_ranges
from ..gemm.tma import matrix_of
from ..rows.copy_rows import launch_spread_rows
from ..rows.valid_tokens import ValidTokens
from .chunks import MULTIPLE, slices

# N tokens, n rows of a chunk, D hidden, V vocabulary


class Gradients(NamedTuple):
    """None if not requested."""

    input: Tensor | None  # (N, D), written
    linear_weight: Tensor | None  # (V, D), written
    bias_sum: Tensor | None  # (V,) float32, added to
    scale_sums: Tensor | None = None  # (N, T) float32: input . grad_input over T tiles of D, for logit_scale

    def summed(self, finish: Finish, chunk: slice, input: Tensor) -> Finish:
        """`finish`, which also sums input . grad_input of the chunk's rows if logit_scale gets a gradient."""
        if self.scale_sums is None:
            return finish
        return finish._replace(input=matrix_of(input), sums=self.scale_sums[chunk])


def wanted_gradients(grads: Sequence[Tensor], call: Any) -> Gradients:
    """From (grad_input, grad_linear_weight, grad_linear_bias). The bias gradient is summed in a float32 buffer of its
    own. The gradient of logit_scale is made from those of input and linear_bias before they are rounded.
    """
    grad_input, grad_weight, grad_bias = [grad if wanted else None for grad, wanted in zip(grads, call.output_mask)]
    input, scale_sums = call.operands.input, None
    if vars(call).get("scale_gradient"):
        grad_input = (
            torch.empty_like(input, memory_format=torch.contiguous_format) if grad_input is None else grad_input
        )
        grad_bias = call.operands.linear_bias if grad_bias is None else grad_bias
        scale_sums = torch.zeros(input.shape[0], cdiv(input.shape[1], SUMMED.value), device=input.device)
    bias_sum = None if grad_bias is None else grad_bias.new_zeros(grad_bias.shape, dtype=torch.float32)
    return Gradients(grad_input, grad_weight, bias_sum, scale_sums)


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
    """grad_input of a chunk. The products of several ranges wait in float32: in `memory`, or in a new buffer
    if `memory` is too small. If it does not hold the products of all rows, rows are processed in groups.
    """
    waiting = products_of_ranges(linear_weight.shape[0]) if by_ranges else 0
    of_row, at_once = waiting * out.shape[1], out.shape[0]
    if waiting:
        memory = memory if memory.shape[0] >= MULTIPLE * of_row else memory.new_empty(MULTIPLE * of_row)
        at_once = memory.shape[0] // of_row // MULTIPLE * MULTIPLE
    for rows in slices(out.shape[0], at_once):
        of_rows = finish.of(rows), valid_tokens.of(rows), memory, blocks, by_ranges
        backend_for(out).input_gradient(out[rows], exponentials[rows], linear_weight, *of_rows)


def finish_gradients(
    grads: Sequence[Tensor], gradients: Gradients, valid_tokens: ValidTokens, place: Tensor, call: Any
) -> None:
    """Rounds the bias's sum into its result, and moves rows of grad_input to their tokens' places."""
    if call.output_mask[2]:
        grads[2].copy_(gradients.bias_sum)
    if call.output_mask[0]:
        launch_spread_rows(gradients.input, valid_tokens, place)
    if gradients.scale_sums is not None:
        grads[3].copy_(gradient_of_scale(gradients, call.operands, call.logits.logit_scale))


def gradient_of_scale(gradients: Gradients, operands: Any, scale: Tensor) -> Tensor:  # ()
    """sum_ij G_ij u_ij / scale, with u = input . linear_weight + linear_bias."""
    total = gradients.scale_sums.sum()
    if operands.linear_bias is not None:  # a class that a bias of -inf switches off has G = 0
        total += torch.where(gradients.bias_sum == 0.0, 0.0, gradients.bias_sum * operands.linear_bias).sum()
    # the products of G and a smaller scale underflow
    return total / torch.where(scale.abs() < torch.finfo(operands.input.dtype).tiny, torch.nan, scale)
