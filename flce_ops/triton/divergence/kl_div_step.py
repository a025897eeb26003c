"""One chunk of tokens of linear_kl_div: the logits of both models in 16 bits, then G over the student's logits.

    rows, teacher's rows = the chunk's valid tokens                                                copy_rows.py
    t = logits of the teacher                   GEMM; float32 row sums in its epilogue             softmax_rows.py
    s = logits of the student                   likewise; ranks that share V exchange row numbers
    divergence, G over s                        one or two passes over s and t                     divergence_rows.py
    grad_linear_weight += G.T @ rows            in float16 until the last chunk                    weight_gradient.py
    grad_input[rows]    = G @ linear_weight     in float32, rounded once; its splits where t was   input_gradient.py

All three operators run this loop. Forward makes no G. Backward starts from the row numbers that forward saved. The
first four lines run for one block of the chunk at a time (kl_div_chunking.py), because the teacher's logits are not
needed once G is made. So 4096 tokens of 151936 classes take 4 chunks of 1024 in the default workspace. With two
matrices of a whole chunk they would take 6 of 768. If the user gives the teacher's probabilities, the kernels read them
in place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...math.kl_div_arguments import KlDivOperands, KlDivOptions
from ...objectives.divergence import DIVERGENCES
from ...support.exchange import all_gather, all_reduce
from ...support.integers import cdiv
from ..gemm.backends import backend_for
from ..gemm.device import tiles_for
from ..gemm.input_gradient import Finish
from ..gemm.split_k import RANGE_BYTES, float32_memory
from ..gemm.tile_sums import launch_max_and_sum
from ..gemm.tma import matrix_of
from ..rows.column_sums import weighted_column_sum
from ..rows.copy_rows import launch_copy_rows
from ..rows.valid_tokens import ValidTokens, room_for_rows
from ..steps.gradients import Gradients, write_input_gradient
from .divergence_rows import Distributions, RowResults, Rows, RowScale
from .kl_div_chunking import chunk_rows, fits_in_logits, row_numbers, stored_dtype
from .softmax_rows import Linear, Softmax, share_denominators, store_logits

# N tokens, n rows of a chunk or block, D and E hidden sizes of student and teacher, V vocabulary (of this rank), T
# tiles along V


@dataclass(eq=False)
class KlDivStep:
    """A step, and the buffers that all of its chunks share."""

    operands: KlDivOperands
    options: KlDivOptions
    valid_tokens: ValidTokens
    gradients: Gradients
    results: RowResults
    scale: RowScale | None = None  # for G
    known: RowResults | None = None  # what forward returned

    def __post_init__(self) -> None:
        operands = self.operands
        self.chunking = chunking = chunk_rows(operands, self.options, self.gradients)
        self.grad_input, grad_weight, self.bias_sum, _ = self.gradients
        input, teacher_input = operands.input, operands.teacher_input
        self.tokens, hidden = input.shape
        self.classes = operands.linear_weight.shape[0]
        self.tile = tiles_for(input).block_n
        dtype = stored_dtype(input, self.options.softcap)
        # the student's logits, then G; after them the teacher's logits
        self.logits = input.new_empty(chunking.rows * row_numbers(self.classes), dtype=dtype)
        self.teacher_rows = None
        if teacher_input is not None and not fits_in_logits(teacher_input, self.classes, dtype.itemsize):
            most = max(block.stop - block.start for blocks in chunking.blocks for block in blocks)
            self.teacher_rows = teacher_input.new_empty(most * teacher_input.shape[1])
        self.apart = input.new_empty(chunking.chunks[0].stop, hidden) if self.grad_input is None else None
        self.backend, self.weight_gradient = backend_for(input), None
        if grad_weight is not None:
            self.weight_gradient = self.backend.weight_gradient(grad_weight, self.tokens, len(chunking.chunks))

    def run(self) -> list[slice]:
        """Returns the chunks."""
        for chunk, blocks in zip(self.chunking.chunks, self.chunking.blocks, strict=True):
            self.run_chunk(chunk, blocks)
        return self.chunking.chunks

    def run_chunk(self, chunk: slice, blocks: list[slice]) -> None:
        valid_tokens, n = self.valid_tokens.of(chunk), chunk.stop - chunk.start
        tokens = self.apart[:n] if self.grad_input is None else self.grad_input[chunk]
        launch_copy_rows(self.operands.input, tokens, valid_tokens)
        logits = matrix(self.logits, n, self.classes)
        for block in blocks:
            self.run_block(valid_tokens.of(block), tokens[block], logits[block])
        if self.scale is not None:
            gradient = matrix(self.logits.view(tokens.dtype), n, self.classes)
            self.add_to_weight(gradient, tokens, valid_tokens)
            self.write_input(gradient, chunk, valid_tokens)

    def run_block(
        self,
        valid_tokens: ValidTokens,
        tokens: Tensor,  # (n, D)
        logits: Tensor,  # (n, V) out: the student's logits, then G
    ) -> None:
        distributions, sums = self.softmaxes(valid_tokens, tokens, logits)
        rows = Rows(distributions, DIVERGENCES[self.options.kind], self.options.beta, valid_tokens, self.tile)
        gradient = None if self.scale is None else logits.view(tokens.dtype)
        if self.known is not None:
            rows.take(self.known)
        if self.known is None or not (self.options.of_student or rows.gradient_at_once):
            totals = rows.add_up(sums, gradient if rows.gradient_at_once else None, self.scale)
            totals = self.add_ranks(totals, rows.kind.shifted)
            rows.finish(totals, self.results, self.tokens)
        if gradient is not None and not (self.known is None and rows.gradient_at_once):
            rows.make_gradient(gradient, self.scale)

    def add_ranks(self, totals: Tensor, shifted: bool) -> Tensor:  # (s, n)
        group, ranks = self.options.group, self.options.ranks
        if not shifted or ranks == 1:
            return all_reduce(totals, group, ranks)
        shift = all_gather(totals[-1], group, ranks).amax(0)
        totals[:2] *= torch.exp2(totals[-1] - shift)
        return torch.cat([all_reduce(totals[:-1].contiguous(), group, ranks), shift[None]])

    def softmaxes(self, valid_tokens: ValidTokens, tokens: Tensor, logits: Tensor) -> tuple[Distributions, Tensor]:
        """Returns the distributions of a block, without their shifts if forward returned these, and (s, T, n) memory
        for sums of tiles.
        """
        operands, options, n = self.operands, self.options, tokens.shape[0]
        models = [Linear(tokens, operands.linear_weight, operands.linear_bias, options.student)]
        matrices = [logits]
        if operands.teacher_input is not None:
            teacher_tokens = self.teacher_tokens(logits)
            launch_copy_rows(operands.teacher_input, teacher_tokens, valid_tokens)
            models.append(Linear(teacher_tokens, operands.teacher_weight, operands.teacher_bias, options.teacher))
            last_rows = self.logits[self.logits.shape[0] - n * row_numbers(self.classes) :]
            matrices.append(matrix(last_rows, n, self.classes))
        matrices_of_tiles = len(models) + DIVERGENCES[options.kind].sums
        tiles = cdiv(self.classes, self.tile)
        per_tile = tokens.new_empty(matrices_of_tiles, tiles, room_for_rows(n), dtype=torch.float32)
        softmaxes = [
            Softmax(stored, stored.stride(0), tile_max, per_tile.new_empty(2, n), softcap)
            for stored, tile_max, softcap in zip(matrices, per_tile, (options.softcap, None))
        ]
        sums = per_tile[len(models) :]
        # the teacher goes first: its gathered rows are in the memory of the student's logits
        for model, softmax, tile_sum in list(zip(models, softmaxes, sums))[::-1]:
            store_logits(model, softmax, tile_sum, valid_tokens)
        if self.known is None:
            for softmax, tile_sum in zip(softmaxes, sums):
                launch_max_and_sum(softmax.tile_max, tile_sum, softmax.shift, valid_tokens)
            share_denominators(softmaxes, options.group, options.ranks)
        teacher = softmaxes[1] if len(softmaxes) > 1 else None
        return Distributions(softmaxes[0], teacher, matrix_of(operands.teacher_probs)), sums

    def teacher_tokens(self, logits: Tensor) -> Tensor:  # (n, V) -> (n, E)
        (n, _), hidden = logits.shape, self.operands.teacher_input.shape[1]
        memory = self.teacher_rows
        if memory is None:
            first = logits.storage_offset()
            memory = self.logits[first : first + n * logits.stride(0)].view(self.operands.teacher_input.dtype)
        return memory[: n * hidden].view(n, hidden)

    def add_to_weight(self, gradient: Tensor, tokens: Tensor, valid_tokens: ValidTokens) -> None:
        if self.bias_sum is not None:
            self.bias_sum += weighted_column_sum(gradient, None, valid_tokens)
        if self.weight_gradient is not None:
            self.weight_gradient.add(gradient, tokens, valid_tokens)

    def write_input(self, gradient: Tensor, chunk: slice, valid_tokens: ValidTokens) -> None:
        """Overwrites the tokens of the chunk with grad_input."""
        if self.grad_input is None:
            return
        memory, by_ranges = self.product_memory(chunk), self.options.batch_invariant
        if by_ranges and memory.shape[0] < RANGE_BYTES // 8:
            memory = memory.new_empty(RANGE_BYTES // 4)
        write_input_gradient(
            self.grad_input[chunk],
            self.operands.linear_weight,
            gradient,
            self.gradients.summed(Finish(), chunk, self.operands.input),
            valid_tokens,
            memory,
            by_ranges=by_ranges,
        )

    def product_memory(self, chunk: slice) -> Tensor:
        """Flat float32 memory: that of the teacher's logits, of later rows of grad_input, or a new buffer."""
        if self.operands.teacher_input is not None:
            rows = chunk.stop - chunk.start
            return float32_memory(self.logits[rows * row_numbers(self.classes) :])
        later, numbers = float32_memory(self.grad_input[chunk.stop :]), self.chunking.product_bytes // 4
        return later if later.shape[0] >= numbers else later.new_empty(numbers)


def matrix(memory: Tensor, n: int, classes: int) -> Tensor:  # (n, V)
    return memory[: n * row_numbers(classes)].view(n, -1)[:, :classes]
