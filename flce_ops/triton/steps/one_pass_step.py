"""A step in one pass over the logits, chunk by chunk: three GEMMs, on one rank or on ranks that share the vocabulary.

    rows = the chunk's valid tokens, target logits                                                 gather_tokens.py
    E = exp(z - reference), row sums Z              the exponentials are rounded once              forward.py
    losses, row factors c, E[i, y_i], c rows        one kernel, for any objective                  finish_rows.py
    with label smoothing, E += k w                  c k w is the rank-1 matrix that it adds to G      smoothing.py
    grad_linear_weight += E.T @ (c rows)            in float16 until the last chunk                weight_gradient.py
    grad_input[rows]    = c (E @ linear_weight)     in float32, rounded once                       input_gradient.py
    rows of grad_input move to their tokens' places; the loss                                         after_chunks.py

The logit gradient is G = c E by rows: c multiplies the (n, D) operands, so E is written once and only GEMMs read it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...math.options import Operands, Statistics, TokenStatistics
from ...math.statistics import argmax_of_shards
from ...math.token_weights_and_denominator import Reduction
from ...objectives.cross_entropy import RowObjective
from ...objectives.token_function import FunctionObjective
from ..gemm.input_gradient import Finish
from ..rows.bias_and_tile_sums import RowSums, launch_sum_tiles
from ..rows.finish_rows import FinishedRows, Tokens, launch_finish_rows, shard_numbers
from ..rows.gather_tokens import launch_gather_targets
from ..rows.gradient_factors import launch_set_entries
from ..rows.row_numbers import launch_row_statistics, launch_token_function, sums_for
from ..rows.smoothing import launch_smoothing
from ..rows.target_rows import TOKENS_AT_MOST
from ..rows.valid_tokens import ValidTokens
from .chunks import Chunking, padded
from .forward import launch_exponentials
from .gradients import ChunkGradient, GradientGemms, Gradients

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
    """A step: what its chunks share, and the stages that make a chunk's E and c."""

    call: Any  # WithGrad, or another call with Operands
    valid_tokens: ValidTokens
    per_token: StepTokens
    gradients: Gradients
    chunks: list[slice]

    def __post_init__(self) -> None:
        self.operands: Operands = self.call.operands
        by_ranges = getattr(self.call, "batch_invariant", False)  # V is split for grad_input: input_gradient.py
        input, linear_weight = self.operands[:2]
        self.gemms = GradientGemms(self.gradients, input, linear_weight, self.chunks, by_ranges)
        statistics = self.per_token.statistics
        asked = sums_for(Statistics(*[out is not None for out in statistics]))
        self.asked = asked._replace(logit_sum=self.per_token.objective.d_sum is not None)
        # the reference replaces the GEMM's logit of its class, as in forward's sums
        self.replaces_own = by_ranges and statistics.entropy is not None
        # the class weights of label smoothing, of the classes that this rank holds
        self.class_weight, self.d_sum = None, self.per_token.objective.d_sum
        if self.d_sum is not None and self.operands.weight is not None:
            start = self.call.vocab_start
            weight = self.operands.weight[start : start + self.operands.linear_weight.shape[0]]
            self.class_weight = weight.float().contiguous()

    def run(self, chunking: Chunking) -> None:
        """Runs over the chunks of all tokens, or of a span of them."""
        if chunking.chunks:
            input, num_classes = self.operands.input, self.operands.linear_weight.shape[0]
            first = chunking.chunks[0]
            columns = padded(num_classes, input.dtype.itemsize)
            self.exponentials = input.new_empty(first.stop - first.start, columns)[:, :num_classes]
            self.gemms.run(chunking, self.valid_tokens, self.make_gradient)
            del self.exponentials  # sparse_step.py sorts its lists in their memory

    def make_gradient(self, chunk: slice, valid_tokens: ValidTokens, rows: Tensor) -> ChunkGradient:
        """Gathers the valid tokens into `rows`, writes E', multiplies the tokens by c, and writes the rows' losses."""
        exponentials, of_tokens = self.exponentials[: rows.shape[0]], self.per_token
        statistics = of_tokens.statistics
        at_target = launch_gather_targets(self.call, valid_tokens, rows)
        # of the targets: logit, dz/du and column
        tokens = Tokens(valid_tokens, *at_target[:3], of_tokens.reduction, of_tokens.losses, of_tokens.log_probs)
        sums = launch_exponentials(
            self.call,
            valid_tokens,
            rows,
            at_target,
            out=exponentials,
            asked=self.asked,
            class_weight=self.class_weight,
            reference_class=at_target.reference_class if self.replaces_own else None,
        )
        self.row_sum = sums.exponentials
        # few tokens: the rows of grad_linear_weight of their targets are made more exact
        few = self.gemms.weight_gradient is not None and rows.shape[0] == self.operands.input.shape[0] <= TOKENS_AT_MOST
        rest = torch.empty_like(rows) if few else None
        finished, sums = self.finish_rows(tokens, sums, rows, exponentials, rest)
        launch_row_statistics(sums, statistics, valid_tokens, self.call.num_classes)
        if finished.smoothing is not None:
            launch_smoothing(exponentials, finished.smoothing, self.class_weight, valid_tokens)
            launch_set_entries(exponentials, tokens.column, finished.entry, valid_tokens)
        # with soft targets, the stages that follow correct one entry of a row
        column = tokens.column if finished.column is None else finished.column
        finish = Finish(finished.row_factor, column, finished.residual)
        of_targets = None if rest is None else (rest, column)
        return ChunkGradient(exponentials, finish, None, finished.weight_factor, of_targets)

    def finish_rows(
        self, tokens: Tokens, sums: RowSums, rows: Tensor, exponentials: Tensor, rest: Tensor | None
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
        finished = launch_finish_rows(
            tokens,
            sums,
            objective,
            exponentials,
            logit_options=self.call.logits,
            d_sum=self.d_sum,
            class_weight=self.class_weight,
            scaled=None if self.gemms.weight_gradient is None else rows,
            rest=rest,
            gathered=gathered,
        )
        if gathered is not None and sums.argmax is not None:
            sums = sums._replace(argmax=argmax_of_shards(gathered[:, -2], gathered[:, -1]))
        return finished, sums
