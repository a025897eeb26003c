"""A step in one pass over the logits, chunk by chunk: three GEMMs, on one rank or on ranks that share the vocabulary.

    rows = the chunk's valid tokens, target logits                                                 gather_tokens.py
    E = exp(z - reference), row sums Z              the exponentials are rounded once              exponentials.py
    losses, row factors c, E[i, y_i]                one kernel, for any objective                  finish_rows.py
    grad_linear_weight += E.T @ (c rows)            in float16 until the last chunk                weight_gradient.py
    grad_input[rows]    = c (E @ linear_weight)     in float32, rounded once                       input_gradient.py
    rows of grad_input move to their tokens' places                                                copy_rows.py

The logit gradient is G = c E by rows: c multiplies the (n, D) operands, so E is written once and only GEMMs read it.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...math.options import Operands, Statistics, TokenStatistics
from ...math.reduction import Reduction
from ...math.shards import argmax_of_shards
from ...objectives.row import RowObjective
from ..gemm.backends import backend_for
from ..gemm.class_blocks import EVERY_BLOCK
from ..gemm.input_gradient import ClassSlices, Finish
from ..gemm.split_k import float32_memory
from ..gemm.tma import NO_OUTER
from ..gemm.weight_gradient import WeightGradient
from ..rows.column_sums import weighted_column_sum
from ..rows.copy_rows import launch_copy_rows
from ..rows.finish_rows import FinishedRows, Tokens, launch_finish_rows, shard_numbers
from ..rows.gather_tokens import launch_gather_targets
from ..rows.row_statistics import launch_row_statistics, sums_for
from ..rows.set_entries import launch_set_entries
from ..rows.smoothing import SmoothingTerms
from ..rows.target_rows import TOKENS_AT_MOST, launch_target_rows
from ..rows.valid_tokens import ValidTokens, choose_chunking
from .chunking import Chunking
from .chunks import padded
from .exponentials import RowSums, launch_exponentials
from .gradients import Gradients, write_input_gradient
from .overlay import Overlay, places, scratch_of

# N tokens, n rows of a chunk, D hidden, V vocabulary (of this rank)

# Takes the tokens, their gradients, and the sum over earlier tokens. Returns the ranges of rows.
Recompute = Callable[[ValidTokens, Gradients, WeightGradient | None], list[slice]]


class StepTokens(NamedTuple):
    """What a step needs and writes for every token; (N,) in the order of all tokens."""

    objective: RowObjective
    reduction: Reduction | None  # None for row scales of 1
    losses: Tensor | None  # out, as are the next two
    statistics: TokenStatistics = TokenStatistics()
    log_probs: Tensor | None = None
    gather: Callable[[Tensor], Tensor] | None = None  # (k, n) -> (R, k, n), if ranks share the vocabulary


@dataclass(eq=False)
class OnePassStep:
    """A step: the buffers that its chunks share, and one method for each stage of a chunk."""

    call: Any  # WithGrad, or another call with Operands
    valid_tokens: ValidTokens
    per_token: StepTokens
    gradients: Gradients
    chunking: Chunking
    smoothing: SmoothingTerms | None = None

    def __post_init__(self) -> None:
        self.operands: Operands = self.call.operands
        self.tokens = self.operands.input.shape[0]  # all N tokens, which the chunks divide
        self.by_ranges = getattr(self.call, "batch_invariant", False)  # V is split for grad_input: split_k.py
        self.grad_input, grad_weight, self.bias_sum = self.gradients
        self.input_blocks = EVERY_BLOCK
        self.backend, self.weight_gradient = backend_for(self.operands.input), None
        chunking = self.chunking
        if grad_weight is not None and not (chunking.recompute and chunking.overlay is None):  # else backward's
            outer = NO_OUTER if self.smoothing is None else self.smoothing.weight_terms()
            self.weight_gradient = self.backend.weight_gradient(
                grad_weight, self.tokens, chunking.most_chunks, outer=outer
            )

    def run(self, recompute: Recompute) -> list[slice]:
        """Runs the overlay chunk, then the other chunks or `recompute`. Returns the ranges of rows."""
        overlay, chunks = [], self.chunking.chunks
        if self.chunking.few:
            few, self.valid_tokens = choose_chunking(self.valid_tokens, self.chunking.few)
            self.run_only(few)
        if self.chunking.overlay is not None:
            self.run_overlay(self.chunking.overlay)
            overlay = [slice(0, self.chunking.overlay.rows)]
        if self.chunking.recompute:
            (rows,) = chunks
            own = self.gradients._replace(input=None if self.grad_input is None else self.grad_input[rows])
            chunks = recompute(self.valid_tokens.of(rows), own, self.weight_gradient)
        else:
            self.run_chunks(chunks)
        return overlay + chunks

    def run_only(self, few: ValidTokens) -> None:
        """Runs all valid tokens in one chunk. The device skips it unless they are few."""
        only = copy.copy(self)
        only.tokens, only.valid_tokens = self.chunking.few, few
        gradient = self.weight_gradient
        only.weight_gradient = self.backend.weight_gradient(gradient.out, only.tokens, 1, outer=gradient.outer)
        only.run_chunks([slice(0, self.chunking.few)])

    def run_chunks(self, chunks: list[slice]) -> None:
        if not chunks:
            return
        input, linear_weight = self.operands[:2]
        count = chunks[0].stop - chunks[0].start
        num_classes, size = linear_weight.shape[0], input.dtype.itemsize
        exponentials = input.new_empty(count, padded(num_classes, size))
        # gathered tokens are stored in their rows of grad_input, which are written after the tokens' last use
        apart = input.new_empty(count, input.shape[1]) if self.grad_input is None else None
        for chunk in chunks:
            n = chunk.stop - chunk.start
            class_slices = [(slice(0, num_classes), exponentials[:n, :num_classes])]
            rows = self.grad_input[chunk] if apart is None else apart[:n]
            tokens, finished = self.exponentiate(chunk, rows, class_slices)
            self.add_to_weight(tokens, rows, class_slices, finished)
            self.write_input(chunk, tokens, class_slices, finished, self.product_memory(chunk))

    def run_overlay(self, overlay: Overlay) -> None:
        chunk, input, grad_weight = slice(0, overlay.rows), self.operands.input, self.weight_gradient.out
        class_slices = list(
            zip(overlay.columns, places(overlay, grad_weight, input.new_empty(overlay.workspace_numbers)))
        )
        scratch = scratch_of(overlay, grad_weight)
        apart = input.new_empty(overlay.rows, input.shape[1]) if overlay.rows_apart else None
        rows = self.grad_input[overlay.rows : 2 * overlay.rows] if apart is None else apart
        tokens, finished = self.exponentiate(chunk, rows, class_slices, scratch)
        self.write_input(chunk, tokens, class_slices, finished, scratch)  # first, because add_to_weight overwrites E
        self.add_to_weight(tokens, rows, class_slices[::-1], finished)

    def exponentiate(
        self, chunk: slice, rows: Tensor, class_slices: ClassSlices, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        """Gathers the valid tokens into `rows`, writes E' into the slices, and adds to the rows' losses and
        grad_linear_bias.
        """
        valid_tokens, of_tokens = self.valid_tokens.of(chunk), self.per_token
        statistics = of_tokens.statistics
        class_sum = None if self.smoothing is None else self.smoothing.class_sum
        at_target = launch_gather_targets(self.call, valid_tokens, rows, class_sum=class_sum)
        # of the targets: logit, dz/du and column
        tokens = Tokens(valid_tokens, *at_target[:3], of_tokens.reduction, of_tokens.losses, of_tokens.log_probs)
        sums = launch_exponentials(
            self.call,
            valid_tokens,
            rows,
            at_target,
            class_slices=class_slices,
            asked=sums_for(Statistics(*(out is not None for out in statistics))),
            # as forward's operator sums
            reference_class=at_target.reference_class if self.by_ranges and statistics.entropy is not None else None,
            scratch=scratch,
        )
        self.row_sum = sums.exponentials
        finished, sums = self.finish_rows(tokens, sums._replace(logit_sum=at_target.logit_sum))
        launch_row_statistics(sums, statistics, valid_tokens, self.call.num_classes)
        for cols, exponentials in class_slices:
            launch_set_entries(exponentials, tokens.column, finished.entry, valid_tokens, start=cols.start)
            if self.bias_sum is not None:
                self.bias_sum[cols] += weighted_column_sum(exponentials, finished.weight_factor, valid_tokens)
        if finished.column is not None:  # with soft targets, the stages that follow correct one entry of a row
            tokens = tokens._replace(column=finished.column)
        return tokens, finished

    def finish_rows(self, tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, RowSums]:
        """Finishes the rows. If ranks share the vocabulary, they exchange their sums here; the argmax is then the whole
        row's.
        """
        gathered, gather = None, self.per_token.gather
        if gather is not None:
            gathered = gather(shard_numbers(tokens, sums, self.call.vocab_start))
        objective, dtype = self.per_token.objective, self.operands.input.dtype
        finished = launch_finish_rows(tokens, sums, objective, dtype, logit_options=self.call.logits, gathered=gathered)
        if gathered is not None and sums.argmax is not None:
            sums = sums._replace(argmax=argmax_of_shards(gathered[:, -2], gathered[:, -1]))
        return finished, sums

    def add_to_weight(self, tokens: Tokens, rows: Tensor, class_slices: ClassSlices, finished: FinishedRows) -> None:
        """grad_linear_weight += E'.T @ (c rows). Overwrites the rows with c rows."""
        if self.weight_gradient is None:
            return
        few = rows.shape[0] == self.tokens <= TOKENS_AT_MOST and len(class_slices) == 1
        rest = rows.new_empty(rows.shape) if few else None
        launch_copy_rows(rows, rows, tokens.valid_tokens, factor=finished.weight_factor, rest=rest)
        for cols, exponentials in class_slices:
            self.weight_gradient.add(cols, exponentials, rows, tokens.valid_tokens)
        if few:
            ((_, exponentials),) = class_slices
            gradient = self.weight_gradient
            launch_target_rows(
                gradient.out, exponentials, rows, rest, tokens.column, tokens.valid_tokens, gradient.outer
            )

    def write_input(
        self, chunk: slice, tokens: Tokens, class_slices: ClassSlices, finished: FinishedRows, product: Tensor
    ) -> None:
        """grad_input = c (E' @ linear_weight) + residual, in the order of the valid tokens."""
        if self.grad_input is None:
            return
        outer = NO_OUTER if self.smoothing is None else self.smoothing.input_terms(tokens.valid_tokens)
        finish = Finish(finished.row_factor, tokens.column, finished.residual, *outer)
        write_input_gradient(
            self.grad_input[chunk],
            self.operands.linear_weight,
            class_slices,
            finish,
            tokens.valid_tokens,
            product,
            blocks=self.input_blocks,
            by_ranges=self.by_ranges,
        )

    def product_memory(self, chunk: slice) -> Tensor:
        """Flat float32 memory: rows of grad_input of later chunks, which are not written yet, or a new buffer."""
        if self.grad_input is None:
            return self.float32(0)
        later, numbers = float32_memory(self.grad_input[chunk.stop :]), self.chunking.product_bytes // 4
        return later if later.shape[0] >= numbers else self.float32(numbers)

    def float32(self, numbers: int) -> Tensor:
        return torch.empty(numbers, dtype=torch.float32, device=self.valid_tokens.order.device)
