"""After the logits GEMM: the losses of a chunk's valid tokens, the factors that turn E into the logit gradient G, and c
times the tokens.

Let p = E / Z, l = g d_lse and a_k = -g slope_k (objectives/cross_entropy.py). Without label smoothing (smoothing.py):

    G_ij = (l p_ij + sum_(k: y_k = j) a_k) dz/du = c E'_ij      c = l logit_scale / Z
                                                                E'_iyk = (E_iyk - Z sum_(equal k) slope_k / d_lse) dz/du
                                                                E'     = E elsewhere

So the row factor c multiplies the (n, D) operands of the two gradient GEMMs, and E is not read again. If ranks share
the vocabulary, Z is the sum of the whole row relative to this rank's reference: 2^(lse2 - r).

Logits, references and logarithms of sums are in base 2 (times log2 e). The functions of an objective get nats.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...math.statistics import lse_of_shards
from ...math.token_weights_and_denominator import Reduction
from ...objectives.cross_entropy import RowNumbers, RowObjective
from ...objectives.in_triton import LN2, number
from ...support.sizes import cdiv
from ..gemm.tiles import in_dtype_of, load_tile, matrix_of, store_tile
from ..kernel import Kernel
from .after_chunks import scale_of_rows
from .bias_and_tile_sums import RowSums, sum_of_tiles
from .gather_tokens import larger_entry, sum_of_equals, topk_at_a_time
from .logit_numbers import sum_from_lse
from .valid_tokens import ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes of a token, V vocabulary, R ranks that share it

ROWS = tl.constexpr(16)  # rows of a program if a token has one class; bias_and_tile_sums.py says why
TILES = tl.constexpr(256)  # tiles whose sums a program reads at a time
COLUMNS = tl.constexpr(512)  # of a token that a program multiplies at a time
# The slopes are divided by d_lse. If |d_lse| is below this fraction of the slopes, it is replaced by the fraction. This
# changes p by a tenth of the rounding error of a.
LEAST_SLOPE = tl.constexpr(2.0**-27)
# If lse2 - r exceeds this, the probabilities of this rank's classes are below 2^-30. Z is capped at 2^90 then, which
# keeps c * input normal numbers.
LARGEST_EXPONENT = tl.constexpr(90.0)


class Tokens(NamedTuple):
    """What is known of a chunk's tokens before the logits GEMM, and where their losses are written.

    Vectors (n,) are in the order of the valid tokens, vectors (N,) in the order of all tokens. For soft targets the
    first three vectors are (n, K).
    """

    valid_tokens: ValidTokens
    target_logit: Tensor  # (n,) z2 of the target, or of column 0 if this rank does not have the target
    # (n,) with a softcap: dz/du / logit_scale at target_logit
    target_dz_du: Tensor | None
    column: Tensor  # (n,) int64, the target's column; -1 if this rank does not have it
    reduction: Reduction | None  # (N,) row scales g_i, or a mean; None for g_i = 1
    losses: Tensor | None  # (N,) out
    log_probs: Tensor | None  # (N,) or (N, K) out, of a token function: row_numbers.py


class WholeRows(NamedTuple):
    """lse and the target's logit over all ranks that share the rows, (n,) each."""

    lse: Tensor
    target_logit: Tensor


class FinishedRows(NamedTuple):
    """What the gradient GEMMs need for each row, (n,) each."""

    entry: Tensor  # E'_iy in E's dtype; (n, K) for soft targets
    row_factor: Tensor  # c_i
    weight_factor: Tensor  # c_i, corrected for the rounding of E_iy
    residual: Tensor  # c_i times that rounding
    smoothing: Tensor | None = None  # k_i, with label smoothing
    column: Tensor | None = None  # int64, with soft targets: the class whose rounding `residual` holds


@triton.jit
def with_shares(row_sum, shares, SOFT: tl.constexpr):
    """Returns Z, or the target's exponential if that is larger. The exact Z cannot be smaller, but both are sums of the
    same products in different orders, with different rounding errors.
    """
    if SOFT:
        return tl.maximum(row_sum, tl.max(shares, 0), propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where(row_sum < shares, shares, row_sum)


@triton.jit
def row_sums(tokens, sums, i, reference, count, n, T, TOPK: tl.constexpr, SOFT: tl.constexpr, BLOCK_TOPK: tl.constexpr):
    """Z of the rows i; 1 for rows from `count` on."""
    mask = i < count
    if sums.tiles is None:
        row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)
    else:
        row_sum = tl.where(mask, sum_of_tiles(sums.tiles, i, count, n, T, TILES), 1.0)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & mask
        logit = tl.load(tokens.target_logit + i.to(tl.int64) * TOPK + k, mask=inside, other=0.0)
        here = tl.load(tokens.column + i.to(tl.int64) * TOPK + k, mask=inside, other=-1) >= 0
        row_sum = with_shares(row_sum, tl.where(here, tl.exp2(logit - reference), 0.0), SOFT)
    return row_sum


@triton.jit
def over_topk(values, SOFT: tl.constexpr):
    if SOFT:
        return tl.sum(values, 0)
    else:
        return values


def shard_numbers(tokens: Tokens, sums: RowSums, vocab_start: int) -> Tensor:
    """Returns the (k, n) numbers that ranks exchange: lse2 of this rank's classes; z2 of the target, or 0; if
    requested, the logit sum, the largest logit and its class.
    """
    here, reference, row_sum = tokens.column >= 0, sums.reference_logit, sums.exponentials
    share = torch.where(here, torch.exp2(tokens.target_logit - reference), 0.0)
    row_sum = torch.where(row_sum < share, share, row_sum)
    numbers = [reference + row_sum.log2(), torch.where(here, tokens.target_logit, 0.0)]
    if sums.logit_sum is not None:
        numbers.append(sums.logit_sum)
    if sums.argmax is not None:
        numbers += [sums.max_logit, (sums.argmax + vocab_start).to(torch.float32)]
    return torch.stack(numbers)


@Kernel
def finish_rows_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    whole,  # WholeRows; None if this rank has all classes
    finished,  # FinishedRows, out
    matrix,  # (n, V) E, in which the targets' entries are replaced
    rows,  # Matrix (n, D): the gathered tokens, which are multiplied by the weight factor; or None
    rest,  # Matrix (n, D), out: what the rounding of these products took; or None
    class_weight_ptr,  # (V,) float32, for label smoothing
    n,
    D,
    T,  # tiles of `sums`
    objective,  # RowNumbers, with tensors as pointers
    d_sum,  # the derivative of a loss by its logit sum; None without label smoothing
    logit_numbers,  # LogitNumbers
    OF_TARGET: tl.constexpr,
    OF_ROW: tl.constexpr,
    BOUNDED: tl.constexpr,
    BY_ROW: tl.constexpr,  # the objective's tensors are by rows of the chunk, not by tokens
    SCALED: tl.constexpr,  # a reduction multiplies the factors
    TOPK: tl.constexpr,
    SOFT: tl.constexpr,  # tokens have K classes (K may be 1)
    BLOCK_TOPK: tl.constexpr,
    SCALED_ROWS: tl.constexpr,  # `rows` is given; Triton 3.6 cannot compare a NamedTuple that holds None with None
    RESTS: tl.constexpr,  # `rest` is given
):
    """A program takes ROWS rows with one target each, or one row with BLOCK_TOPK targets at a time. So vectors have
    ROWS or BLOCK_TOPK numbers.
    """
    BLOCK_N: tl.constexpr = 1 if SOFT else ROWS
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = valid_rows(tokens.valid_tokens, n)
    mask = i < count
    token = tl.load(tokens.valid_tokens.order + i, mask=i < n, other=0)
    own = token
    if BY_ROW:
        own = i
    at = (own, mask)
    row_topk, own_topk = i.to(tl.int64) * TOPK, own.to(tl.int64) * TOPK
    reference = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    row_sum = row_sums(tokens, sums, i, reference, count, n, T, TOPK, SOFT, BLOCK_TOPK)
    tl.store(sums.exponentials + i, row_sum, mask=mask)
    log2_sum = tl.log2(row_sum)
    lse2 = reference + log2_sum
    if whole is not None:
        lse2 = tl.load(whole.lse + i, mask=mask, other=0.0)
        # 0 if a bias of -inf switches off all classes of this rank; nan if it switches off those of all ranks
        exponent = tl.where(row_sum > 0.0, lse2 - reference, 0.0 * lse2)
        row_sum = tl.exp2(tl.where(exponent > LARGEST_EXPONENT, LARGEST_EXPONENT, exponent))

    value = tl.zeros((BLOCK_N,), tl.float32)
    slope = tl.zeros((BLOCK_N,), tl.float32)  # sum_k slope_k
    size = tl.zeros((BLOCK_N,), tl.float32)  # sum_k |slope_k|
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & mask
        if whole is not None:
            distance = lse2 - tl.load(whole.target_logit + i, mask=mask, other=0.0)
        else:
            logit = tl.load(tokens.target_logit + row_topk + k, mask=inside, other=0.0)
            distance = (reference - logit) + log2_sum
        weight = None
        if objective.weight is not None:
            weight = tl.load(objective.weight + own_topk + k, mask=inside, other=0.0)
        surprisal = distance * LN2
        of_target, slope_of_target = OF_TARGET(surprisal, weight, at, objective)
        if SOFT:  # a class of weight 0 may be switched off by a bias of -inf
            of_target = tl.where(weight == 0.0, 0.0, of_target)
        value += over_topk(of_target, SOFT)
        slope += over_topk(slope_of_target, SOFT)
        size += over_topk(tl.abs(slope_of_target + tl.zeros_like(distance)), SOFT)
    logit_sum = None
    if sums.logit_sum is not None:
        logit_sum2 = tl.load(sums.logit_sum + i, mask=mask, other=0.0)
        class_weight_sum = number(objective.class_weight_sum, objective.num_classes * 1.0)
        logit_sum = sum_from_lse(logit_sum2, class_weight_sum, lse2)
    value, d_lse = OF_ROW(value, slope, lse2 * LN2, logit_sum, at, objective)
    if tokens.losses is not None:
        tl.store(tokens.losses + token, tl.where(mask, value, 0.0), mask=i < n)

    if d_sum is not None:
        size += tl.abs(d_sum + tl.zeros_like(size))
    # The divisor keeps c E' finite if d_lse is tiny beside the slopes. A scale of inf times a d_lse of 0 stays nan, as
    # in ATen.
    divisor = tl.where(tl.abs(d_lse) < size * LEAST_SLOPE, size * LEAST_SLOPE, d_lse)
    scaled = divisor
    if SCALED:
        row_scale = scale_of_rows(tokens.reduction, tokens.valid_tokens, token, mask)
        scaled = row_scale * d_lse
        scaled = tl.where(scaled == scaled, row_scale * divisor, scaled)
        if BOUNDED:
            scaled = tl.where(divisor == 0.0, 0.0, scaled)
    logit_scale = number(logit_numbers.logit_scale, 1.0)
    row_factor = scaled * logit_scale / row_sum
    divisor = tl.where((divisor == 0.0) & (size == 0.0), 1.0, divisor)
    if d_sum is not None:
        smoothing = row_sum * (d_sum / divisor)
        # as the two terms of an infinite slope, of which one is inf and the other -inf
        smoothing = tl.where(tl.abs(row_factor) == float("inf"), float("nan"), smoothing)
        tl.store(finished.smoothing + i, smoothing, mask=mask)

    largest_size, largest = tl.full((), -1.0, tl.float32), tl.full((), 0.0, tl.float32)
    column_of_largest = tl.full((), -1, tl.int64)
    weight_factor = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & mask
        logit = tl.load(tokens.target_logit + row_topk + k, mask=inside, other=0.0)
        column = tl.load(tokens.column + row_topk + k, mask=inside, other=-1)
        slope_of_entry = slope
        if SOFT:
            weight = sum_of_equals(column, tokens.column + row_topk, objective.weight + own_topk, TOPK, BLOCK_TOPK)
            _, slope_of_entry = OF_TARGET(((reference - logit) + log2_sum) * LN2, weight, at, objective)
        entry = tl.exp2(logit - reference) - row_sum * (slope_of_entry / divisor)
        if d_sum is not None:
            class_weight = 1.0
            if class_weight_ptr is not None:
                class_weight = tl.load(class_weight_ptr + column, mask=inside & (column >= 0), other=0.0)
            entry += smoothing * class_weight
        # an infinite row factor (a normalizer of 0) makes the entry inf - inf, which is nan, as is every sum over it
        entry = tl.where(tl.abs(row_factor) == float("inf"), float("nan"), entry)
        if tokens.target_dz_du is not None:
            entry *= tl.load(tokens.target_dz_du + row_topk + k, mask=inside, other=0.0)
        rounded = entry.to(finished.entry.dtype.element_ty)
        tl.store(finished.entry + row_topk + k, rounded, mask=inside)
        places = matrix.pointer + i.to(tl.int64) * matrix.stride + column
        tl.store(places, rounded, mask=inside & (column >= 0))  # equal classes of a token have equal entries
        if SOFT:
            largest_size, largest, column_of_largest = larger_entry(
                largest_size, largest, column_of_largest, entry, column, BLOCK_TOPK
            )
        else:
            weight_factor = store_factors(finished, i, mask, row_factor, entry, rounded.to(tl.float32), column >= 0)
    if SOFT:
        rounded = largest.to(finished.entry.dtype.element_ty).to(tl.float32)
        weight_factor = store_factors(finished, i, mask, row_factor, largest, rounded, True)
        tl.store(finished.column + i, column_of_largest, mask=mask)
    if SCALED_ROWS:
        for start in range(0, D, COLUMNS):
            d = start + tl.arange(0, COLUMNS)
            product = load_tile(rows, i, d, mask, d < D).to(tl.float32) * weight_factor[:, None]
            if RESTS:
                stored = in_dtype_of(rows, product, False).to(tl.float32)
                lost = tl.where(tl.abs(stored) == float("inf"), 0.0, product - stored)  # avoids inf - inf
                store_tile(rest, lost, i, d, mask, d < D)
            store_tile(rows, product, i, d, mask, d < D)


@triton.jit
def store_factors(finished, i, mask, row_factor, entry, rounded, here):
    """Stores the factors of a row, corrected for the rounding of the target's entry. Returns that for linear_weight.

    The target's entry dominates its row, and its rounding dominates the error of the gradients. In grad_linear_weight
    the row factor makes up for the rounding, so that the product with E'_iy is exact. This moves the row's other
    entries, which belong to other classes, by a factor within 2^-8 of 1. In grad_input these changes would add up if
    rows of linear_weight share a direction. So grad_input keeps the plain factor, and the residual is added separately.
    If a token has several targets, only the largest of their entries is corrected: only that entry can dominate the
    row, and correcting all would read K rows of linear_weight again.
    """
    correction = tl.where(here & (tl.abs(rounded) > 0.0), entry / rounded, 1.0)  # nan gets 1, too
    tl.store(finished.row_factor + i, row_factor, mask=mask)
    tl.store(finished.weight_factor + i, row_factor * correction, mask=mask)
    tl.store(finished.residual + i, row_factor * (entry - rounded), mask=mask)
    return row_factor * correction + tl.zeros(mask.shape, tl.float32)


def launch_finish_rows(
    tokens: Tokens,
    sums: RowSums,
    objective: RowObjective,
    exponentials: Tensor,  # (n, V) E, in which the targets' entries are replaced
    *,
    logit_options: LogitOptions,
    d_sum: float | None = None,  # the objective's; smoothing.py
    class_weight: Tensor | None = None,  # (V,) float32
    scaled: Tensor | None = None,  # (n, D) the gathered tokens, which are multiplied by the weight factor
    rest: Tensor | None = None,  # (n, D) out: what the rounding of these products took; rows after the valid ones stay
    gathered: Tensor | None = None,  # (R, k, n), the numbers of every rank
) -> FinishedRows:
    column, soft = tokens.column, tokens.column.dim() == 2
    n, topk = column.shape[0], column.shape[1] if soft else 1
    row_factor, weight_factor, residual = row_vectors(column, 3, n)
    finished = FinishedRows(
        exponentials.new_empty(column.shape),
        row_factor,
        weight_factor,
        residual,
        smoothing=None if d_sum is None else torch.empty_like(row_factor),
        column=column.new_empty(n) if soft else None,
    )
    whole = None
    if gathered is not None:
        whole = WholeRows(lse_of_shards(gathered[:, 0], torch.exp2, torch.log2), gathered[:, 1].sum(0))
        if sums.logit_sum is not None:
            sums = sums._replace(logit_sum=gathered[:, 2].sum(0))
    hidden, tiles = 0 if scaled is None else scaled.shape[1], 0 if sums.tiles is None else sums.tiles.shape[0]
    numbers = RowNumbers(*objective)  # Triton does not see the fields of a derived class
    of_rows = tokens, sums, whole, finished, *map(matrix_of, (exponentials, scaled, rest)), class_weight
    of_objective = {"OF_TARGET": objective.of_target.jit, "OF_ROW": objective.of_row.jit}
    of_objective |= {"BOUNDED": objective.bounded, "BY_ROW": objective.by_row}
    finish_rows_kernel[(n if soft else cdiv(n, ROWS.value),)](
        *(*of_rows, n, hidden, tiles, numbers, d_sum, logit_options),
        **of_objective,
        SCALED=tokens.reduction is not None,
        TOPK=topk,
        SOFT=soft,
        BLOCK_TOPK=topk_at_a_time(topk),
        SCALED_ROWS=scaled is not None,
        RESTS=rest is not None,
        num_warps=4,
    )
    return finished
