"""The divergence of a chunk of rows, and its gradient G by the logits, from the stored logits of both models.

                 V                       V
        ┌──┬──┬──┬──┐            ┌──┬──┬──┬──┐
      n │  │▓▓│  │  │ student  n │  │▓▓│  │  │ teacher        a program has rows of one tile      stored_tiles.py
        └──┴──┴──┴──┘            └──┴──┴──┴──┘

    0. maxima and sums of the GEMM's tiles      give the lse_pair of each row of either model
    1. sum over each row, tile by tile          objectives/divergence.py defines the sums; "forward" makes G here
    2. add up all tiles (and ranks)             gives the divergence and the one number a row that G needs
    3. G = row_scale logit_scale G', rounded    written over the student's logits

    log q_ij = (u_ij + (tile_max_it - reference_i)) - log_sum_i

The reference is the row's maximum over this rank's columns. log_sum is the log of the softmax's denominator relative to
it. Numbers are in base 2 unless nats are named.

The denominator sums the exponentials of the rounded numbers, so the probabilities q add up to 1. If rounding moves a
logit by e_j, log q_j moves by e_j less the mean of e under q, and the divergence sum_j p_j (log p_j - log q_j) by
sum_j (q_j - p_j) e_j, which is small near the teacher. With the denominator of the exact logits it would move by
-sum_j p_j e_j: for a sure token, the rounding of its largest logit.

Both passes over the matrices are bound by memory traffic: they read 4 bytes an entry, and write 2 if they make G.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...math.statistics import log_denominator
from ...objectives import divergence
from ...objectives.divergence import Divergence
from ...objectives.in_triton import LN2, number
from ...support.sizes import cdiv
from ..gemm.backends import backend_for
from ..gemm.epilogues import MaxSum
from ..gemm.tiles import Matrix, load_tile
from ..kernel import Kernel
from ..rows.bias_and_tile_sums import launch_max_and_sum, launch_sum_tiles
from ..rows.logit_numbers import store_pair
from ..rows.valid_tokens import ValidTokens, row_distance, row_vectors, valid_rows
from .stored import StoredLogits, log_probabilities, stored_logits
from .stored_tiles import Pair, launch_stored_tiles, row_pair, vectors_of_pair

# N tokens, n rows of a chunk, V vocabulary (of this rank), T tiles along it, s sums of a row

LEAST_UNSHIFTED = tl.constexpr(divergence.LEAST_UNSHIFTED)  # of logarithms in base 2 here
ROWS = tl.constexpr(64)  # of a program that reads one number for each row


@dataclass(eq=False)
class Softmax:
    """A model's head applied to gathered tokens, and its stored logits."""

    rows: Tensor  # (n, D) of valid tokens
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    options: LogitOptions
    numbers: Tensor  # (n, V) out, the stored logits
    tile_max: Tensor  # (T, n') out
    before_softcap: bool = False

    def __post_init__(self) -> None:
        self.softcap = self.options.softcap if self.before_softcap else None
        self.stored = stored_logits(self.numbers, self.tile_max[:, : self.numbers.shape[0]].T)
        self.pair: Pair = row_vectors(self.tile_max, 2, self.numbers.shape[0])

    def store(self, valid_tokens: ValidTokens, partial: Tensor, row_max: Tensor) -> None:
        """Stores the logits. `partial` and `row_max` are (T, n') memory for sums of exponentials of tiles, and for
        their maxima where these are not those of the stored logits.
        """
        row_max = self.tile_max if self.softcap is None else row_max
        options = LogitOptions(None, self.options.logit_scale) if self.before_softcap else self.options
        epilogue = MaxSum(partial, row_max, self.stored, self.softcap)
        given = self.rows, self.weight, self.bias, epilogue, options, valid_tokens
        backend_for(self.rows).logits(*given, out=self.numbers)

    def add_up(self, valid_tokens: ValidTokens, partial: Tensor, row_max: Tensor) -> None:
        """Computes the lse_pair from the sums that `store` made."""
        reference, log_sum = self.pair
        row_max = self.tile_max if self.softcap is None else row_max
        launch_max_and_sum(row_max, partial, reference, log_sum, valid_tokens)


def share_denominators(softmaxes: list[Softmax], group: str | None, ranks: int) -> None:
    """Replaces the denominators of this rank's columns by those of whole rows."""
    if ranks == 1:
        return
    row_max, log_sum = (torch.stack(numbers) for numbers in zip(*(softmax.pair for softmax in softmaxes)))
    denominators = log_denominator(row_max, log_sum, group, ranks, torch.exp2, torch.log2)
    for softmax, denominator in zip(softmaxes, denominators):
        softmax.pair[1].copy_(denominator)


class Entries(NamedTuple):
    """What `divergence_of_tile` reads and writes beside the student's logits."""

    teacher: StoredLogits | None  # either a teacher with its lse_pair, or probabilities
    teacher_pair: Pair | None
    teacher_probs: Matrix | None  # (N, V)
    beta: Tensor | None  # (), used by "jsd"
    sums: Tensor | None = None  # (s, T, n') out
    row_number: Tensor | None = None  # (n,), the number of each row that G needs; None for 1
    offset: Tensor | None = None  # (n,), for a shifted kind
    row_scale: Tensor | None = None  # (N,) factors of G, as is the next
    logit_scale: Tensor | None = None  # ()


@triton.jit
def divergence_of_tile(operands, log2_q, at, n, V, KNOWN, KIND, OF_ENTRY, GRADIENT):
    """Stores sums over the tile unless OF_ENTRY is None, and returns G unless GRADIENT is None."""
    rows, token, cols, row_mask, col_mask, tile = at
    PROBS: tl.constexpr = KIND[0]  # the teacher's probabilities are given
    OF_GIVEN_P: tl.constexpr = KIND[1]  # the functions of an entry take p instead of log p
    SHIFTED: tl.constexpr = KIND[2]  # each tile's shift is stored behind its sums
    OF_TOKENS: tl.constexpr = KIND[3]  # row_number and offset are (N,), in nats
    beta = number(operands.beta)
    if PROBS:
        log2_p = load_tile(operands.teacher_probs, token, cols, row_mask, col_mask).to(tl.float32)
        if not OF_GIVEN_P:
            log2_p = tl.log2(log2_p)
    else:
        pair = row_pair(operands.teacher_pair, rows, token, row_mask, KNOWN)
        log2_p, _ = log_probabilities(operands.teacher, None, pair, rows, cols, row_mask, tile, V)
    if OF_ENTRY is not None:
        places = operands.sums + tile.to(tl.int64) * row_distance(n) + rows
        next_sum = tl.cdiv(V, log2_q.shape[1]).to(tl.int64) * row_distance(n)
        if SHIFTED:
            largest = tl.max(tl.minimum(log2_q, log2_p), 1)
            largest = tl.where(largest < LEAST_UNSHIFTED, largest, 0.0)
            terms = OF_ENTRY(log2_q, log2_p, tl.where(largest == float("-inf"), 0.0, largest)[:, None])
            tl.store(places + len(terms) * next_sum, largest, mask=row_mask)
        else:
            terms = OF_ENTRY(log2_q, log2_p, beta)
        for k in tl.static_range(len(terms)):
            tl.store(places + k * next_sum, tl.sum(terms[k], 1), mask=row_mask)
    if GRADIENT is None:
        return log2_q
    else:
        row_number = 1.0
        if operands.row_number is not None:
            row_number = number_of_rows(operands.row_number, rows, token, row_mask, OF_TOKENS)
        if operands.offset is not None:
            offset = number_of_rows(operands.offset, rows, token, row_mask, OF_TOKENS)
            row_number = (row_number, offset)  # type: ignore[assignment]
        factor = tl.load(operands.row_scale + token, mask=row_mask, other=0.0) * number(operands.logit_scale, 1.0)
        # nan everywhere: an infinite factor would otherwise give inf, -inf and nan in one row
        factor = tl.where(tl.abs(factor) == float("inf"), float("nan"), factor)
        return GRADIENT(log2_q, log2_p, row_number, factor[:, None], beta)


@triton.jit
def number_of_rows(pointer, rows, token, row_mask, OF_TOKENS: tl.constexpr):
    if OF_TOKENS:
        return (tl.load(pointer + token, mask=row_mask, other=0.0) / LN2)[:, None]
    else:
        return tl.load(pointer + rows, mask=row_mask, other=0.0)[:, None]


class RowResults(NamedTuple):
    """In nats, indexed by token; 0 for ignored tokens. Forward returns them; backward gets the first for a shifted kind
    alone.
    """

    divergence: Tensor | None = None  # (N,)
    lse_pair: Tensor | None = None  # (N, 2)
    teacher_lse_pair: Tensor | None = None  # (N, 2), if the teacher is a model
    student_kl: Tensor | None = None  # (N,), K; None for "forward" and class probabilities


@Kernel
def finish_divergence_kernel(
    totals_ptr,  # (s, n)
    beta_ptr,  # (), used by "jsd"
    pair,  # Pair of the student
    teacher_pair,  # Pair
    results,  # RowResults
    row_number_ptr,  # (n,) out
    offset_ptr,  # (n,) out; or None
    valid_tokens,  # ValidTokens
    n,
    OF_SUMS: tl.constexpr,
    OFFSET_OF_SUMS: tl.constexpr,
    SUMS: tl.constexpr,  # s, the number of sums
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    mask = i < valid_rows(valid_tokens, n)
    token = tl.load(valid_tokens.order + i, mask=inside, other=0)
    totals = ()
    for k in tl.static_range(SUMS):
        totals += (tl.load(totals_ptr + k * n + i, mask=mask, other=1.0),)  # type: ignore[assignment]
    value, row_number = OF_SUMS(totals, number(beta_ptr))
    tl.store(row_number_ptr + i, row_number, mask=mask)
    if offset_ptr is not None:
        tl.store(offset_ptr + i, OFFSET_OF_SUMS(totals), mask=mask)
    if results.divergence is not None:
        tl.store(results.divergence + token, tl.where(mask, value, 0.0), mask=inside)
    if results.student_kl is not None:
        tl.store(results.student_kl + token, tl.where(mask, row_number * LN2, 0.0), mask=inside)
    if results.lse_pair is not None:
        store_pair(results.lse_pair, token, *vectors_of_pair(pair, i, mask), mask, inside)
    if results.teacher_lse_pair is not None:
        store_pair(results.teacher_lse_pair, token, *vectors_of_pair(teacher_pair, i, mask), mask, inside)


@dataclass(eq=False)
class Rows:
    """Launches the kernels of a chunk's rows, and holds their numbers."""

    student: Softmax
    entries: Entries
    kind: type[Divergence]
    valid_tokens: ValidTokens
    of_tokens: bool  # row_number and offset are those of backward's tokens

    def add_up(self, sums: Tensor, gradient: Tensor | None) -> Tensor:
        """Writes the (s, T, n') sums of the tiles and returns the (s, n) sums of the rows. Makes G, too, if it needs no
        row sum.
        """
        self.entries = self.entries._replace(sums=sums)
        self.launch(gradient, self.kind.of_entry.jit)
        n = self.valid_tokens.order.shape[0]
        totals = sums.new_empty(sums.shape[0], n)
        if self.kind.shifted:  # the tiles' sums are made relative to the row's shift
            shift = sums[-1].amax(0).clamp(min=-1e30)
            sums[:2] *= torch.exp2(sums[-1] - shift)
        launch_sum_tiles(sums, totals, self.valid_tokens)
        if self.kind.shifted:
            totals[-1] = shift[:n]
        return totals

    def finish(self, totals: Tensor, results: RowResults) -> None:
        """Writes the results, and the numbers of rows that G needs."""
        n, of_sums = totals.shape[1], self.kind.offset_of_sums
        row_number, offset = totals.new_empty(n), None if of_sums is None else totals.new_empty(n)
        self.entries = self.entries._replace(row_number=row_number, offset=offset)
        pairs = self.student.pair, self.entries.teacher_pair
        of_rows = totals, self.entries.beta, *pairs, results, row_number, offset, self.valid_tokens, n
        finish_divergence_kernel[(cdiv(n, ROWS.value),)](
            *of_rows,
            OF_SUMS=self.kind.of_sums.jit,
            OFFSET_OF_SUMS=None if of_sums is None else of_sums.jit,
            SUMS=self.kind.sums,
            num_warps=2,
        )

    def launch(self, gradient: Tensor | None, of_entry: Any = None) -> None:
        launch_stored_tiles(
            *(self.student.stored, self.student.pair, self.entries, self.valid_tokens),
            function=divergence_of_tile,
            out=gradient,
            softcap=self.student.softcap,
            kind=(self.entries.teacher is None, self.kind.of_given_p, self.kind.shifted, self.of_tokens),
            of_entry=of_entry,
            gradient=None if gradient is None else self.kind.gradient.jit,
        )
