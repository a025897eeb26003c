"""Numbers of rows from the sums over their classes, in nats, written to the tokens' places.

With r the reference, E = 2^(z - r), Z = sum_j E_j, and everything in base 2:

    lse               r + log Z, one number or an lse_pair
    expected          sum_j E_j (z_j - r) / Z - log Z, the expected log-probability, and the entropy its negative
    log_sum_sq_probs  log sum_j E_j^2 - 2 log Z
    mean_logit        sum_j z_j / V
    logit_sum         sum_j w_j (z_j - lse)

The entropy and log_sum_sq_probs use differences from r, so a large r costs them no digits. sum_j E_j^2 is at most Z^2,
which is below 2^120: if Z is 2^60 or more, a rescue chooses a larger r (steps/forward.py). The sum is at least 1,
because r is the logit of one of the classes.

For a function of one token, one kernel makes log_prob and lse of a chunk's rows, and the function makes losses and
slopes by torch's operations on (n,) (objectives/token_function.py). Rows after the valid ones hold no token, and the
host does not know how many there are. The function sees harmless numbers there.
"""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from ...math.options import Statistics, TokenStatistics
from ...objectives.in_triton import LN2, number
from ...objectives.token_function import FunctionObjective, GivenLosses, LossesOfRows, Slopes
from ...support.sizes import cdiv
from ..kernel import Kernel, launches
from .bias_and_tile_sums import Asked, RowSums, sum_of_tiles
from .finish_rows import ROWS, TILES, Tokens, row_sums
from .gather_tokens import AtTarget, topk_at_a_time
from .logit_numbers import rescaled, store_pair, sum_from_lse, surprisal_in_nats
from .valid_tokens import ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes and C numbers of a token, V vocabulary (of this rank), T tiles along it


class RowOutputs(NamedTuple):
    """(N,) each, in the order of all tokens; None if not requested."""

    target_logit: Tensor | None = None  # or (N, K)
    lse_pair: Tensor | None = None  # (N, 2)
    logit_sum: Tensor | None = None
    expected_log_prob: Tensor | None = None
    max_logit: Tensor | None = None
    argmax: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    losses: Tensor | None = None  # of given logits


def sums_for(asked: Statistics) -> Asked:
    """The sums that the requested statistics need."""
    return Asked(False, asked.entropy, asked.argmax, asked.log_sum_sq_probs, asked.mean_logit)


@Kernel
def row_numbers_kernel(
    sums,  # RowSums
    at_target,  # AtTarget; None if the rows are finished
    class_weight_sum,  # (1,) float32; None for V
    outputs,  # RowOutputs, out
    valid_tokens,  # ValidTokens
    n,
    V,
    num_classes,  # over all ranks
    T,
    TOPK: tl.constexpr,  # K; 0 if the rows are finished: their sums are added up, and the targets are not read
):
    """Ignored tokens get 0, and an argmax of -1. So do targets that another rank has."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    count = valid_rows(valid_tokens, n)
    mask = i < count
    token = tl.load(valid_tokens.order + i, mask=inside, other=0)
    reference2 = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    if TOPK == 0:
        row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)
    else:
        largest = tl.full((ROWS,), float("-inf"), tl.float32)  # of the targets' logits
        for k in range(TOPK):
            place, to = i.to(tl.int64) * TOPK + k, token.to(tl.int64) * TOPK + k
            hit = tl.load(at_target.column + place, mask=mask, other=-1) >= 0
            target_logit2 = tl.load(at_target.logit + place, mask=mask, other=0.0)
            if TOPK == 1:
                largest = target_logit2  # of column 0, if this rank lacks the target
            else:
                largest = tl.maximum(largest, tl.where(hit, target_logit2, float("-inf")))
            tl.store(outputs.target_logit + to, tl.where(hit, target_logit2 * LN2, 0.0), mask=inside)
        row_sum = tl.where(mask, sum_of_tiles(sums.tiles, i, count, n, T, TILES), 1.0)
        # Rounding must not leave the row sum below the target's exponential, which comes from the same products, summed
        # in another order.
        row_sum = tl.maximum(row_sum, tl.exp2(largest - reference2), propagate_nan=tl.PropagateNan.ALL)
    log2_sum = tl.log2(row_sum)
    if outputs.lse_pair is not None:
        store_pair(outputs.lse_pair, token, reference2, log2_sum, mask, inside)
    if outputs.lse is not None:
        reference, log_sum = rescaled(reference2, log2_sum, LN2)  # as lse_pair, so that the bits are the same
        tl.store(outputs.lse + token, tl.where(mask, reference + log_sum, 0.0), mask=inside)
    if outputs.logit_sum is not None:
        logit_sum2 = tl.load(sums.logit_sum + i, mask=mask, other=0.0)
        logit_sum = sum_from_lse(logit_sum2, number(class_weight_sum, V), reference2 + log2_sum)
        tl.store(outputs.logit_sum + token, tl.where(mask, logit_sum, 0.0), mask=inside)
    if sums.expected is not None:
        expected = (tl.load(sums.expected + i, mask=mask, other=0.0) / row_sum - log2_sum) * LN2
        if outputs.entropy is not None:
            tl.store(outputs.entropy + token, tl.where(mask, -expected, 0.0), mask=inside)
        else:
            tl.store(outputs.expected_log_prob + token, tl.where(mask, expected, 0.0), mask=inside)
    if outputs.argmax is not None:
        tl.store(outputs.argmax + token, tl.load(sums.argmax + i, mask=mask, other=-1), mask=inside)
    if outputs.max_logit is not None:
        tl.store(outputs.max_logit + token, tl.load(sums.max_logit + i, mask=mask, other=0.0) * LN2, mask=inside)
    if outputs.log_sum_sq_probs is not None:
        log2_squares = tl.log2(tl.load(sums.squares + i, mask=mask, other=1.0)) - 2.0 * log2_sum
        tl.store(outputs.log_sum_sq_probs + token, tl.where(mask, log2_squares * LN2, 0.0), mask=inside)
    if outputs.mean_logit is not None:
        mean2 = tl.load(sums.total + i, mask=mask, other=0.0) / num_classes
        tl.store(outputs.mean_logit + token, tl.where(mask, mean2 * LN2, 0.0), mask=inside)


def launch_row_numbers(
    sums: RowSums,
    at_target: AtTarget | None,  # None: the rows are finished
    outputs: RowOutputs,
    valid_tokens: ValidTokens,
    num_classes: int,
    classes: int = 0,  # of this rank
    class_weight_sum: Tensor | None = None,  # (1,) float32, of this rank's classes; None for their number
) -> None:
    n, topk = valid_tokens.order.shape[0], 0
    if at_target is not None:
        topk = 1 if at_target.column.dim() == 1 else at_target.column.shape[1]
    tiles = 0 if sums.tiles is None else sums.tiles.shape[0]
    of_rows = sums, at_target, class_weight_sum, outputs, valid_tokens, n, classes, num_classes, tiles
    row_numbers_kernel[(cdiv(n, ROWS.value),)](*of_rows, TOPK=topk, num_warps=4)


def launch_row_statistics(
    sums: RowSums, statistics: TokenStatistics, valid_tokens: ValidTokens, num_classes: int
) -> None:
    """Of finished rows. `statistics` has rows for all tokens, `sums` for those of `valid_tokens`."""
    if any(out is not None for out in statistics):
        outputs, lse = RowOutputs(**statistics._asdict()), statistics.lse
        if lse is not None and lse.dim() == 2:  # of a shard
            outputs = outputs._replace(lse=None, lse_pair=lse)
        launch_row_numbers(sums, None, outputs, valid_tokens, num_classes)


BLOCK = tl.constexpr(1024)  # numbers that a program moves


@Kernel
def token_numbers_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    log_prob_ptr,  # (n,) or (n, K) out; -1 where no token or class counts
    lse_ptr,  # (n,) out; 0 where no token is
    n,
    T,  # tiles of `sums`
    TOPK: tl.constexpr,
    SOFT: tl.constexpr,  # tokens have K classes (K may be 1)
    BLOCK_TOPK: tl.constexpr,
):
    BLOCK_N: tl.constexpr = 1 if SOFT else ROWS
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = valid_rows(tokens.valid_tokens, n)
    mask = i < count
    token = tl.load(tokens.valid_tokens.order + i, mask=i < n, other=0)
    reference = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    row_sum = row_sums(tokens, sums, i, reference, count, n, T, TOPK, SOFT, BLOCK_TOPK)
    tl.store(sums.exponentials + i, row_sum, mask=mask)
    log2_sum = tl.log2(row_sum)
    high, low = rescaled(reference, log2_sum, LN2)
    tl.store(lse_ptr + i, tl.where(mask, high + low, 0.0), mask=i < n)
    row_topk, token_topk = i.to(tl.int64) * TOPK, token.to(tl.int64) * TOPK
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & (i < n)
        here = tl.load(tokens.column + row_topk + k, mask=inside & mask, other=-1) >= 0
        logit = tl.load(tokens.target_logit + row_topk + k, mask=inside & mask, other=0.0)
        log_prob = -surprisal_in_nats(logit, reference + tl.zeros_like(logit), log2_sum + tl.zeros_like(logit))
        tl.store(log_prob_ptr + row_topk + k, tl.where(here, log_prob, -1.0), mask=inside)
        tl.store(tokens.log_probs + token_topk + k, tl.where(here, log_prob, 0.0), mask=inside)


@Kernel
def in_order_kernel(
    values_ptr,  # (N, C)
    out_ptr,  # (N, C), row i: that of the valid token i; 0 after the valid tokens
    valid_tokens,  # ValidTokens
    N,
    C,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, inside = place // C, place < N.to(tl.int64) * C
    mask = inside & (row < tl.load(valid_tokens.total))
    token = tl.load(valid_tokens.order + row, mask=mask, other=0).to(tl.int64)
    tl.store(out_ptr + place, tl.load(values_ptr + token * C + place % C, mask=mask, other=0), mask=inside)


def launch_in_order(values: Tensor, valid_tokens: ValidTokens) -> Tensor:  # (N, ...)
    """The values of the valid tokens, in their order."""
    values = values.contiguous()
    out = values.new_empty(values.shape)
    if values.numel():
        columns = values.numel() // values.shape[0]
        of_values = values, out, valid_tokens, values.shape[0], columns
        in_order_kernel[(cdiv(values.numel(), BLOCK.value),)](*of_values, num_warps=4)
    return out


def launch_token_function(objective: FunctionObjective, tokens: Tokens, sums: RowSums) -> tuple[GivenLosses, RowSums]:
    """The results of the function for a chunk. `objective` has its tensors by rows of the chunk."""
    column, soft = tokens.column, tokens.column.dim() == 2
    n, topk, tiles = column.shape[0], column.shape[1] if soft else 1, 0 if sums.tiles is None else sums.tiles.shape[0]
    log_prob, lse = row_vectors(column, 2, n)
    if soft:
        log_prob = lse.new_empty(column.shape)
    shape = {"TOPK": topk, "SOFT": soft, "BLOCK_TOPK": topk_at_a_time(topk)}
    grid = (n if soft else cdiv(n, ROWS.value),)
    token_numbers_kernel[grid](tokens, sums, log_prob, lse, n, tiles, **shape, num_warps=4)
    function, reads_lse = objective.options, "lse" in objective.options.reads
    if launches.only_compile:
        losses, slopes = lse, Slopes(log_prob, lse if reads_lse else None)
    else:
        losses, slopes = function.losses_and_slopes(log_prob, lse if reads_lse else None, objective.tokens)
    by_log_prob = slopes.log_prob.masked_fill(column < 0, 0.0) if soft else slopes.log_prob.contiguous()
    of_rows = LossesOfRows(losses.contiguous(), None if slopes.lse is None else slopes.lse.contiguous())
    return GivenLosses(tokens=of_rows, weight=by_log_prob), sums._replace(tiles=None)
