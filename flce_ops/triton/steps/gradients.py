"""Which gradients a step makes, the GEMMs of a chunk's G, and how gradients are finished after all chunks.

for each chunk:     rows = its valid tokens; G         by the step: one_pass_step.py, backward.py, logits/kl_div.py
                    grad_linear_bias += sum of G over rows                                    bias_and_tile_sums.py
                    grad_linear_weight += G.T @ rows                                             weight_gradient.py
                    grad_input[rows] = G @ linear_weight                                          input_gradient.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...support.sizes import cdiv
from ..gemm.backends import backend_for
from ..gemm.input_gradient import SUMMED, Finish, products_of_ranges
from ..gemm.tiles import EVERY_BLOCK, ClassBlocks
from ..rows.after_chunks import LossSum, launch_after_chunks
from ..rows.bias_and_tile_sums import weighted_column_sum
from ..rows.target_rows import launch_target_rows
from ..rows.valid_tokens import ValidTokens
from .chunks import MULTIPLE, Chunking, slices

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
        between_tokens, between_features = input.stride()
        sums = self.scale_sums[chunk]
        return finish._replace(input=input, between_tokens=between_tokens, between_features=between_features, sums=sums)


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
    matrix: Tensor,  # (n, V), G or E
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
    launch = backend_for(out).input_gradient
    waiting = products_of_ranges(linear_weight.shape[0]) if by_ranges else 0
    if not waiting:
        launch(out, matrix, linear_weight, finish, valid_tokens, memory, blocks, by_ranges)
        return
    of_row = waiting * out.shape[1]
    memory = memory if memory.shape[0] >= MULTIPLE * of_row else memory.new_empty(MULTIPLE * of_row)
    for rows in slices(out.shape[0], memory.shape[0] // of_row // MULTIPLE * MULTIPLE):
        of_rows = finish.of(rows), valid_tokens.of(rows), memory, blocks, by_ranges
        launch(out[rows], matrix[rows], linear_weight, *of_rows)


class ChunkGradient(NamedTuple):
    """What a step makes of a chunk: G, or E with G = c E by rows, where the chunk's tokens are c times themselves."""

    matrix: Tensor  # (n, V), G or E; or f G, with RowPowers
    finish: Finish = Finish()  # what the GEMM of grad_input adds to its product; c, if the matrix is E
    memory: Tensor | None = None  # flat float32 that products may use
    bias_factor: Tensor | None = None  # (n,), c for the bias's sum; None for 1
    # (n, D), what rounding took from the tokens, and (n,) the targets: rows that target_rows.py makes more exact
    of_targets: tuple[Tensor, Tensor] | None = None


class RowPowers(NamedTuple):
    """Takes back f, by which rows of G are multiplied if the operands are float16: a power of two for each token.

    grad_input = (f G) @ linear_weight / f        grad_linear_weight = (f G).T @ (F / f input) / F, F the least f
    """

    # valid tokens first, as in `order`
    inverse: Tensor  # (N,) 1 / f
    ratio: Tensor  # (N,) F / f; 1 if all tokens have the same weight
    inverse_least: Tensor  # () 1 / F


SMALLEST_SCALE = 1e-30  # a learnt scale below this has a gradient of nan: G, a multiple of it, underflows


def powers_for_float16(
    bound: Tensor,  # (N,), of the entries of a row of G / logit_scale, but for a factor of about log V
    logit_scale: Tensor | None,  # ()
    valid_tokens: ValidTokens,
) -> tuple[Tensor, RowPowers]:
    """f (N,): f bound |logit_scale| is 2 to 4, so that f G has room below float16's largest number, 65504; at least 1.

    float16's smallest number is 6e-8, and without a loss scale most entries of a mean's G are less. In the mean over
    2048 tokens the lost ones were 1.7 % of the input's gradient, and more than all of the scale's, whose terms cancel.
    """
    size = bound if logit_scale is None else bound * logit_scale.abs().clamp(min=SMALLEST_SCALE)
    most = 126  # of float32's exponents, whose least is -126
    exponent = (2 - torch.frexp(size).exponent).clamp(0, most).masked_fill(size == 0.0, most)
    power = ((exponent + 127) << 23).view(torch.float32)  # 2^exponent, by its bits
    in_order = power[valid_tokens.order]
    valid = torch.arange(size.shape[0], device=size.device) < valid_tokens.total
    least = torch.where(valid, in_order, 2.0**most).amin()
    return power, RowPowers(1.0 / in_order, least / in_order, 1.0 / least)


@dataclass(eq=False)
class GradientGemms:
    """The loop over chunks of every step that makes gradients, and the memory that the chunks share."""

    gradients: Gradients
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    chunks: list[slice]  # all of the step
    by_ranges: bool  # V is split into ranges for grad_input: input_gradient.py
    adds: bool = False  # the weight's gradient is added to what its memory holds
    powers: RowPowers | None = None  # given if the matrices are f G

    def __post_init__(self) -> None:
        grad_input, grad_weight, *_ = self.gradients
        tokens, hidden = self.input.shape
        most_rows = max((chunk.stop - chunk.start for chunk in self.chunks), default=0)
        # gathered tokens are stored in their rows of grad_input, which are written after the tokens' last use
        self.apart = self.input.new_empty(most_rows, hidden) if grad_input is None else None
        self.input_blocks, self.weight_gradient = EVERY_BLOCK, None
        if grad_weight is not None:
            made = backend_for(self.input).weight_gradient
            factor = None if self.powers is None else self.powers.inverse_least
            self.weight_gradient = made(grad_weight, tokens, 1 if self.adds else len(self.chunks), self.adds, factor)

    def run(
        self,
        chunking: Chunking,  # of all tokens, or of a span of them
        valid_tokens: ValidTokens,
        make: Callable[[slice, ValidTokens, Tensor], ChunkGradient | None],
    ) -> list[slice]:
        """`make` gathers the tokens of a chunk into (n, D) memory, and makes G. Returns the chunks."""
        for chunk in chunking.chunks:
            here, apart = valid_tokens.of(chunk), self.apart
            rows = self.gradients.input[chunk] if apart is None else apart[: chunk.stop - chunk.start]
            gradient = make(chunk, here, rows)
            if gradient is not None:
                self.multiply(gradient, chunk, here, rows, chunking.product_bytes // 4)
        return chunking.chunks

    def multiply(
        self, gradient: ChunkGradient, chunk: slice, valid_tokens: ValidTokens, rows: Tensor, numbers: int
    ) -> None:
        (matrix, finish, memory, bias_factor, of_targets), grad_input = gradient, self.gradients.input
        if self.powers is not None:
            assert finish.row_factor is None and bias_factor is None and of_targets is None
            bias_factor = inverse = self.powers.inverse[chunk]
            residual = None if finish.residual is None else finish.residual * inverse
            finish = finish._replace(row_factor=inverse, residual=residual)
            if self.weight_gradient is not None:
                rows.mul_(self.powers.ratio[chunk, None])
        if self.gradients.bias_sum is not None:
            self.gradients.bias_sum.add_(weighted_column_sum(matrix, bias_factor, valid_tokens))
        if self.weight_gradient is not None:
            self.weight_gradient.add(matrix, rows, valid_tokens)
            if of_targets is not None:
                launch_target_rows(self.weight_gradient.out, matrix, rows, *of_targets, valid_tokens)
        if grad_input is not None:
            if memory is None or memory.shape[0] < numbers:
                memory = torch.empty(numbers, dtype=torch.float32, device=matrix.device)
            finish = self.gradients.summed(finish, chunk, self.input)
            # `rows` is the part of grad_input that this writes
            of_rows = rows, self.linear_weight, matrix, finish, valid_tokens, memory
            write_input_gradient(*of_rows, blocks=self.input_blocks, by_ranges=self.by_ranges)


def finish_step(
    grads: Sequence[Tensor],
    gradients: Gradients,
    valid_tokens: ValidTokens,
    place: Tensor,
    call: Any,
    loss_sum: LossSum | None = None,
) -> None:
    """Sums the losses, rounds the bias's sum into its result, and moves rows of grad_input to their tokens' places."""
    if call.output_mask[2]:
        grads[2].copy_(gradients.bias_sum)
    moved = gradients.input if call.output_mask[0] else None
    if loss_sum is not None or moved is not None:
        launch_after_chunks(valid_tokens.total, loss_sum, moved, place)
    if gradients.scale_sums is not None:
        grads[3].copy_(gradient_of_scale(gradients, call.operands, call.logits.logit_scale))


def gradient_of_scale(gradients: Gradients, operands: Any, scale: Tensor) -> Tensor:  # ()
    """sum_ij G_ij u_ij / scale, with u = input . linear_weight + linear_bias."""
    total = gradients.scale_sums.sum()
    if operands.linear_bias is not None:  # a class that a bias of -inf switches off has G = 0
        total += torch.where(gradients.bias_sum == 0.0, 0.0, gradients.bias_sum * operands.linear_bias).sum()
    return total / torch.where(scale.abs() < SMALLEST_SCALE, torch.nan, scale)
