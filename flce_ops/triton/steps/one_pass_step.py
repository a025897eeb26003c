"""A step in one pass over the logits, chunk by chunk: three GEMMs, on one rank or on ranks that share the vocabulary.

    rows = the chunk's valid tokens, target logits                                                 gather_tokens.py
    E = exp(z - reference), row sums Z              the exponentials are rounded once              exponentials.py
    losses, row factors c, E[i, y_i], c rows        one kernel, for any objective                  finish_rows.py
    grad_linear_weight += E.T @ (c rows)            in float16 until the last chunk                weight_gradient.py
    grad_input[rows]    = c (E @ linear_weight)     in float32, rounded once                       input_gradient.py
    rows of grad_input move to their tokens' places; the loss                                   after_chunks.py

The logit gradient is G = c E by rows: c multiplies the (n, D) operands, so E is written once and only GEMMs read it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...math.options import Operands, Statistics, TokenStatistics
from ...math.statistics import argmax_of_shards
from ...math.weights_and_denominator import Reduction
from ...objectives.cross_entropy import RowObjective
from ...objectives.token_function import FunctionObjective
from ..gemm.backends import backend_for
from ..gemm.input_gradient import Finish
from ..gemm.tile_sums import launch_sum_tiles
from ..gemm.tiles import EVERY_BLOCK
from ..gemm.tma import NO_OUTER
from ..rows.column_sums import SmoothingTerms, weighted_column_sum
from ..rows.finish_rows import FinishedRows, Tokens, launch_finish_rows, shard_numbers
from ..rows.gather_tokens import launch_gather_targets
from ..rows.row_numbers import launch_row_statistics, launch_token_function, sums_for
from ..rows.target_rows import TOKENS_AT_MOST, launch_target_rows
from ..rows.valid_tokens import ValidTokens
from .chunks import Chunking, padded
from .exponentials import RowSums, launch_exponentials
from .gradients import Gradients, write_input_gradient

# N tokens, n rows of a chunk, D hidden, V vocabulary (of this rank)


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
        self.grad_input, grad_weight, self.bias_sum, _ = self.gradients
        self.input_blocks = EVERY_BLOCK
        self.backend, self.weight_gradient = backend_for(self.operands.input), None
        if grad_weight is not None:
            outer = NO_OUTER if self.smoothing is None else self.smoothing.weight_terms()
            chunks = len(self.chunking.chunks)
            self.weight_gradient = self.backend.weight_gradient(grad_weight, self.tokens, chunks, outer=outer)

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
            rows, of_chunk = self.grad_input[chunk] if apart is None else apart[:n], exponentials[:n, :num_classes]
            tokens, finished = self.exponentiate(chunk, rows, of_chunk)
            self.add_to_weight(tokens, rows, of_chunk)
            self.write_input(chunk, tokens, of_chunk, finished)

    def exponentiate(self, chunk: slice, rows: Tensor, exponentials: Tensor) -> tuple[Tokens, FinishedRows]:
        """Gathers the valid tokens into `rows`, writes E', and adds to the rows' losses and grad_linear_bias."""
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
            out=exponentials,
            asked=sums_for(Statistics(*[out is not None for out in statistics])),
            # as forward's operator sums
            reference_class=at_target.reference_class if self.by_ranges and statistics.entropy is not None else None,
        )
        self.row_sum = sums.exponentials
        finished, sums = self.finish_rows(tokens, sums._replace(logit_sum=at_target.logit_sum), rows, exponentials)
        launch_row_statistics(sums, statistics, valid_tokens, self.call.num_classes)
        if self.bias_sum is not None:
            self.bias_sum += weighted_column_sum(exponentials, finished.weight_factor, valid_tokens)
        if finished.column is not None:  # with soft targets, the stages that follow correct one entry of a row
            tokens = tokens._replace(column=finished.column)
        return tokens, finished

    @property
    def scales_rows(self) -> bool:
        """Whether the GEMM of grad_linear_weight runs."""
        return self.weight_gradient is not None

    def finish_rows(
        self, tokens: Tokens, sums: RowSums, rows: Tensor, exponentials: Tensor
    ) -> tuple[FinishedRows, RowSums]:
        """Finishes the rows, and replaces E by E' and the tokens in `rows` by c times these. If ranks share the
        vocabulary, they exchange their sums here; the argmax is then the whole row's.
        """
        gathered, gather = None, self.per_token.gather
        if gather is not None:
            launch_sum_tiles(sums.tiles, sums.exponentials, tokens.valid_tokens)
            sums = sums._replace(tiles=None)
            gathered = gather(shard_numbers(tokens, sums, self.call.vocab_start))
        objective = self.per_token.objective
        if isinstance(objective, FunctionObjective):
            start = tokens.valid_tokens.start
            objective = objective.of(slice(start, start + rows.shape[0]))
            objective, sums = launch_token_function(objective, tokens, sums)
        few = self.scales_rows and rows.shape[0] == self.tokens <= TOKENS_AT_MOST
        self.rest = torch.empty_like(rows) if few else None
        finished = launch_finish_rows(
            tokens,
            sums,
            objective,
            exponentials,
            logit_options=self.call.logits,
            scaled=rows if self.scales_rows else None,
            rest=self.rest,
            gathered=gathered,
        )
        if gathered is not None and sums.argmax is not None:
            sums = sums._replace(argmax=argmax_of_shards(gathered[:, -2], gathered[:, -1]))
        return finished, sums

    def add_to_weight(self, tokens: Tokens, rows: Tensor, exponentials: Tensor) -> None:
        """grad_linear_weight += E'.T @ (c rows). `rows` holds c rows."""
        if self.scales_rows:
            gradient = self.weight_gradient
            gradient.add(exponentials, rows, tokens.valid_tokens)
            if self.rest is not None:
                operands = exponentials, rows, self.rest, tokens.column, tokens.valid_tokens
                launch_target_rows(gradient.out, *operands, gradient.outer)

    def write_input(self, chunk: slice, tokens: Tokens, exponentials: Tensor, finished: FinishedRows) -> None:
        """grad_input = c (E' @ linear_weight) + residual, in the order of the valid tokens."""
        if self.grad_input is None:
            return
        outer = NO_OUTER if self.smoothing is None else self.smoothing.input_terms(tokens.valid_tokens)
        finish = Finish(finished.row_factor, tokens.column, finished.residual, *outer)
        finish = self.gradients.summed(finish, chunk, self.operands.input)
        numbers, device = self.chunking.product_bytes // 4, exponentials.device
        write_input_gradient(
            self.grad_input[chunk],
            self.operands.linear_weight,
            exponentials,
            finish,
            tokens.valid_tokens,
            torch.empty(numbers, dtype=torch.float32, device=device),
            blocks=self.input_blocks,
            by_ranges=self.by_ranges,
        )
