"""Losses of a chunk's valid tokens once their row sums are known, and what makes E the gradient of the logits.

With l = g d_lse and a_k = -g slope_k (flce_ops/objectives/row.py), p = E / Z and without label smoothing

    G_ij = (l p_ij + sum_(k: y_k = j) a_k) dz/du = c E'_ij      c = l logit_scale / Z
                                                                E'_iyk = (E_iyk - Z sum_(equal k) slope_k / d_lse) dz/du
                                                                E'     = E elsewhere

so the row factor c goes to the (n, D) sides of the two GEMMs and E is not read again. Over a vocabulary that ranks
share, Z is the whole row's in units of this rank's reference: 2^(lse2 - r).

Logits, references and logarithms of sums are in base 2 (times log2 e), but for what an objective reads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...math.reduction import Reduction
from ...math.shards import lse_of_shards
from ...objectives.in_triton import LN2
from ...objectives.row import RowNumbers, RowObjective
from ..launch.replay import Kernel
from ..steps.exponentials import RowSums
from .logit_numbers import numbers_in_kernel, scale_of
from .sum_losses import scale_of_rows
from .topk import larger_entry, sum_of_equals, topk_at_a_time
from .two_sum import surprisal_in_nats
from .valid_tokens import ValidTokens, row_vectors, valid_rows, written_rows

# N tokens, n rows of a chunk, K classes of a token, V vocabulary, R ranks that share it

ROWS = 64  # of a program, where a token has one class
# d_lse divides the slopes. Below this part of them it is made so large: p moves by a tenth of a rounding of a.
LEAST_SLOPE = tl.constexpr(2.0**-27)
# lse2 - r beyond this: this rank's classes have probabilities below 2^-30, and 2^-90 leaves c * input normal numbers.
LARGEST_EXPONENT = tl.constexpr(90.0)


class Tokens(NamedTuple):
    """What is known of a chunk's tokens before the logits GEMM, and where their losses go.

    (n,) are in the order of the valid tokens, (N,) as the tokens stand. Of a soft target the first three vectors are
    (n, K).
    """

    valid_tokens: ValidTokens
    target_logit: Tensor  # (n,) z2 of the target, or of column 0 where the target is not here
    target_dz_du: Tensor | None  # (n,) dz/du / logit_scale at target_logit, with a softcap; or its class scale
    column: Tensor  # (n,) int64, the target's, -1 where it is not here
    reduction: Reduction | None  # of (N,) row scales g_i, or a mean; None for 1
    losses: Tensor | None  # (N,) out
    log_probs: Tensor | None  # (N,) out


class WholeRows(NamedTuple):
    """Of rows whose classes ranks share, (n,) each."""

    lse: Tensor
    target_logit: Tensor


class FinishedRows(NamedTuple):
    """What the gradient GEMMs need of rows, (n,) each."""

    entry: Tensor  # E'_iy in E's dtype; of a soft target (n, K)
    row_factor: Tensor  # c_i
    weight_factor: Tensor  # c_i with the rounding of E_iy taken up
    residual: Tensor  # c_i times that rounding
    column: Tensor | None = None  # int64, of a soft target: the class of the entry whose rounding it is
    row_sum: Tensor | None = None  # where ranks share a row: Z over all of them, of this rank's reference


@triton.jit
def with_shares(row_sum, shares, SOFT: tl.constexpr):
    """Z, at least the targets' shares of it, which were summed in another order of the same products."""
    if SOFT:
        return tl.maximum(row_sum, tl.max(shares, 0), propagate_nan=tl.PropagateNan.ALL)
    else:
        return tl.where(row_sum < shares, shares, row_sum)


@triton.jit
def over_topk(values, SOFT: tl.constexpr):
    if SOFT:
        return tl.sum(values, 0)
    else:
        return values


@Kernel
def shard_numbers_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    numbers_ptr,  # (k, n) out: lse2 of this rank's classes, z2 of the target or 0, and their logit sum if it is there
    n,
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < valid_rows(tokens.valid_tokens, n)
    reference = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    logit = tl.load(tokens.target_logit + i, mask=mask, other=0.0)
    here = tl.load(tokens.column + i, mask=mask, other=-1) >= 0
    row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)
    row_sum = with_shares(row_sum, tl.where(here, tl.exp2(logit - reference), 0.0), False)
    tl.store(numbers_ptr + i, reference + tl.log2(row_sum), mask=mask)
    tl.store(numbers_ptr + n + i, tl.where(here, logit, 0.0), mask=mask)
    if sums.logit_sum is not None:
        tl.store(numbers_ptr + 2 * n + i, tl.load(sums.logit_sum + i, mask=mask, other=0.0), mask=mask)


def launch_shard_numbers(tokens: Tokens, sums: RowSums) -> Tensor:
    """(k, n), to be exchanged: 2, 3 with logit sums. With argmax 2 more, which the caller fills in behind them."""
    n = tokens.column.shape[0]
    count = 2 + (sums.logit_sum is not None) + 2 * (sums.argmax is not None)
    numbers = torch.empty(count, n, dtype=torch.float32, device=tokens.column.device)
    shard_numbers_kernel[(triton.cdiv(n, ROWS),)](tokens, sums, numbers, n, BLOCK_N=ROWS, num_warps=2)
    return numbers


@Kernel
def finish_rows_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    whole,  # WholeRows, or None where this rank has all classes
    finished,  # FinishedRows, out
    n,
    objective,  # its tensors as pointers
    logit_numbers,  # LogitNumbers
    OF_TARGET: tl.constexpr,
    OF_ROW: tl.constexpr,
    BOUNDED: tl.constexpr,
    SCALED: tl.constexpr,  # by the reduction
    TOPK: tl.constexpr,
    SOFT: tl.constexpr,  # K targets a token, one perhaps
    BLOCK_N: tl.constexpr,  # 1 of a soft target
    BLOCK_TOPK: tl.constexpr,
):
    """BLOCK_N rows of one target, or BLOCK_TOPK targets at a time of one row: vectors of one of the two."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < valid_rows(tokens.valid_tokens, n)
    token = tl.load(tokens.valid_tokens.order + i, mask=i < n, other=0)
    at = (token, mask)
    row_topk, token_topk = i.to(tl.int64) * TOPK, token.to(tl.int64) * TOPK
    reference = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & mask
        logit = tl.load(tokens.target_logit + row_topk + k, mask=inside, other=0.0)
        here = tl.load(tokens.column + row_topk + k, mask=inside, other=-1) >= 0
        row_sum = with_shares(row_sum, tl.where(here, tl.exp2(logit - reference), 0.0), SOFT)
    tl.store(sums.exponentials + i, row_sum, mask=mask)
    log2_sum = tl.log2(row_sum)
    lse2 = reference + log2_sum
    if whole is not None:
        lse2 = tl.load(whole.lse + i, mask=mask, other=0.0)
        # 0 where a bias of -inf switches off all classes of this rank (nan if those of all ranks)
        exponent = tl.where(row_sum > 0.0, lse2 - reference, 0.0 * lse2)
        row_sum = tl.exp2(tl.where(exponent > LARGEST_EXPONENT, LARGEST_EXPONENT, exponent))
        tl.store(finished.row_sum + i, row_sum, mask=mask)

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
            weight = tl.load(objective.weight + token_topk + k, mask=inside, other=0.0)
        surprisal = distance * LN2
        if tokens.log_probs is not None:
            log_prob = -surprisal_in_nats(logit, reference, log2_sum)
            tl.store(
                tokens.log_probs + token, tl.where(mask, log_prob, 0.0), mask=written_rows(tokens.valid_tokens, i, n)
            )
        of_target, slope_of_target = OF_TARGET(surprisal, weight, at, objective)
        if SOFT:  # a bias of -inf may switch the class of a weight of 0 off
            of_target = tl.where(weight == 0.0, 0.0, of_target)
        value += over_topk(of_target, SOFT)
        slope += over_topk(slope_of_target, SOFT)
        size += over_topk(tl.abs(slope_of_target + tl.zeros_like(distance)), SOFT)
    logit_sum = None
    if sums.logit_sum is not None:
        logit_sum = tl.load(sums.logit_sum + i, mask=mask, other=0.0) * LN2
    value, d_lse = OF_ROW(value, slope, lse2 * LN2, logit_sum, at, objective)
    if tokens.losses is not None:
        tl.store(tokens.losses + token, tl.where(mask, value, 0.0), mask=written_rows(tokens.valid_tokens, i, n))

    # c E' is to stay finite where d_lse vanishes beside the slopes. A scale of inf times a d_lse of 0 is nan, as in
    # ATen.
    divisor = tl.where(tl.abs(d_lse) < size * LEAST_SLOPE, size * LEAST_SLOPE, d_lse)
    scaled = divisor
    if SCALED:
        row_scale = scale_of_rows(tokens.reduction, tokens.valid_tokens, token, mask)
        scaled = row_scale * d_lse
        scaled = tl.where(scaled == scaled, row_scale * divisor, scaled)
        if BOUNDED:
            scaled = tl.where(divisor == 0.0, 0.0, scaled)
    logit_scale = scale_of(logit_numbers, token, mask)
    row_factor = scaled * logit_scale / row_sum
    divisor = tl.where((divisor == 0.0) & (size == 0.0), 1.0, divisor)

    largest_size, largest = tl.full((), -1.0, tl.float32), tl.full((), 0.0, tl.float32)
    column_of_largest = tl.full((), -1, tl.int64)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & mask
        logit = tl.load(tokens.target_logit + row_topk + k, mask=inside, other=0.0)
        column = tl.load(tokens.column + row_topk + k, mask=inside, other=-1)
        slope_of_entry = slope
        if SOFT:
            weight = sum_of_equals(column, tokens.column + row_topk, objective.weight + token_topk, TOPK, BLOCK_TOPK)
            _, slope_of_entry = OF_TARGET(((reference - logit) + log2_sum) * LN2, weight, at, objective)
        entry = tl.exp2(logit - reference) - row_sum * (slope_of_entry / divisor)
        # a row factor of inf (a normalizer of 0) makes the entry inf - inf: nan, and so is every sum over it
        entry = tl.where(tl.abs(row_factor) == float("inf"), float("nan"), entry)
        if tokens.target_dz_du is not None:
            entry *= tl.load(tokens.target_dz_du + row_topk + k, mask=inside, other=0.0)
        rounded = entry.to(finished.entry.dtype.element_ty)
        tl.store(finished.entry + row_topk + k, rounded, mask=inside)
        if SOFT:
            largest_size, largest, column_of_largest = larger_entry(
                largest_size, largest, column_of_largest, entry, column, BLOCK_TOPK
            )
        else:
            store_factors(finished, i, mask, row_factor, entry, rounded.to(tl.float32), column >= 0)
    if SOFT:
        rounded = largest.to(finished.entry.dtype.element_ty).to(tl.float32)
        store_factors(finished, i, mask, row_factor, largest, rounded, True)
        tl.store(finished.column + i, column_of_largest, mask=mask)


@triton.jit
def store_factors(finished, i, mask, row_factor, entry, rounded, here):
    """The factors of a row, and what the rounding of the target's entry takes.

    The entry dominates its row, and its rounding dominates the error of the gradients. In grad_linear_weight the row's
    factor makes up for it: E'_iy becomes exact. The other entries belong to other classes; together they move by less
    than 2^-8. In grad_input those moves would add up, along what linear_weight's rows share. So grad_input keeps the
    plain factor, and the residual is added by itself. The largest of several targets' entries is taken: it is the one
    that may dominate the row, and all of them would read K rows of linear_weight again.
    """
    correction = tl.where(here & (tl.abs(rounded) > 0.0), entry / rounded, 1.0)  # 1 for nan, too
    tl.store(finished.row_factor + i, row_factor, mask=mask)
    tl.store(finished.weight_factor + i, row_factor * correction, mask=mask)
    tl.store(finished.residual + i, row_factor * (entry - rounded), mask=mask)


def launch_finish_rows(
    tokens: Tokens,
    sums: RowSums,
    objective: RowObjective,
    dtype: torch.dtype,  # of E
    *,
    logit_options: LogitOptions,
    gathered: Tensor | None = None,  # (R, k, n) every rank's numbers
) -> FinishedRows:
    column, soft = tokens.column, tokens.column.dim() == 2
    n, rows, topk = column.shape[0], 1 if soft else ROWS, column.shape[1] if soft else 1
    row_factor, weight_factor, residual = row_vectors(column, 3, n)
    finished = FinishedRows(
        torch.empty(column.shape, dtype=dtype, device=column.device),
        row_factor,
        weight_factor,
        residual,
        column=column.new_empty(n) if soft else None,
        row_sum=None if gathered is None else sums.exponentials.new_empty(sums.exponentials.shape),
    )
    whole = None
    if gathered is not None:
        whole = WholeRows(lse_of_shards(gathered[:, 0], torch.exp2, torch.log2), gathered[:, 1].sum(0))
        if sums.logit_sum is not None:
            sums = sums._replace(logit_sum=gathered[:, 2].sum(0))
    finish_rows_kernel[(triton.cdiv(n, rows),)](
        tokens,
        sums,
        whole,
        finished,
        n,
        in_kernel(objective),
        numbers_in_kernel(logit_options),
        OF_TARGET=objective.of_target.jit,
        OF_ROW=objective.of_row.jit,
        BOUNDED=objective.bounded,
        SCALED=tokens.reduction is not None,
        TOPK=topk,
        SOFT=soft,
        BLOCK_N=rows,
        BLOCK_TOPK=topk_at_a_time(topk),
        num_warps=2,
    )
    return finished


def in_kernel(objective: RowObjective) -> RowNumbers:
    """What it knows, an argument of a kernel, which is compiled for each of the names among its options.

    Triton sees the fields of a NamedTuple, not those of a class derived from one.
    """
    options = objective.options
    if options is not None:
        options = type(options)(*(tl.constexpr(value) if isinstance(value, str) else value for value in options))
    return RowNumbers(options, *objective[1:])
