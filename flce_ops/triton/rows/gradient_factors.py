"""The factors of a row of the logit gradient, once its lse is known. The epilogue "gradient" reads them.

    G_ij = (row_factor_i + shift_factor_i (z_ij - lse_i)) p_ij + sum_factor_i w_j,  and at the target + target_i

They follow from the cotangents a, l, m and h of target_logit, lse, logit_sum and expected_log_prob (hbar):

    row_factor = l - h hbar      shift_factor = h      sum_factor = m      target = a

because the derivative of hbar = sum_j p_j (z_j - lse) by z_j is p_j (z_j - lse - hbar). Kernels have logits in base 2
(times log2 e).

With soft targets, G at the K classes of a token is computed from these factors; a is the cotangent of the targets'
logits:

    G_iyk = ((row_factor_i + shift_factor_i (z_iyk - lse_i)) p_iyk + sum_factor_i w_yk + sum_(equal k) a_ik) dz/du_iyk
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ..gemm.epilogues import Gradient
from ..gemm.logits_gemm import LOG2E
from ..launch.replay import Kernel
from .gather_tokens import AtTarget
from .logit_numbers import numbers_in_kernel, scale_of
from .topk import larger_entry, sum_of_equals, topk_at_a_time
from .valid_tokens import ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes, V vocabulary

BLOCK_N = 64


class KnownRows(NamedTuple):
    """Forward's numbers and the cotangents of all tokens, (N,) float32 each, in the order of all tokens; None if
    absent.
    """

    lse: Tensor
    lse_rest: Tensor | None
    expected_log_prob: Tensor | None
    grad_target_logit: Tensor | None  # (N, K) with several classes per token
    grad_lse: Tensor | None
    grad_logit_sum: Tensor | None
    grad_expected_log_prob: Tensor | None


@triton.jit
def of_tokens(pointer, token, mask):
    return tl.load(pointer + token, mask=mask, other=0.0)


@Kernel
def gradient_factors_kernel(
    tokens,  # KnownRows
    at_target,  # AtTarget
    rows,  # Gradient, out, its class weights apart
    entry_ptr,  # (n,) out, G at the target; None for a soft target
    residual_ptr,  # (n,) out, what rounding it takes
    logit_numbers,  # LogitNumbers
    valid_tokens,  # ValidTokens
    n,
    HALF: tl.constexpr,  # dtype of G
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < valid_rows(valid_tokens, n)
    token = tl.load(valid_tokens.order + i, mask=mask, other=0)
    scale = scale_of(logit_numbers, token, mask)

    lse = of_tokens(tokens.lse, token, mask)
    lse64 = lse.to(tl.float64)
    if tokens.lse_rest is not None:
        lse64 += of_tokens(tokens.lse_rest, token, mask).to(tl.float64)
    exact_lse2 = lse64 * tl.full((BLOCK_N,), 1.4426950408889634, tl.float64)
    lse2 = exact_lse2.to(tl.float32)
    # p computed as exp2(z2 - lse2) is too large or too small by this factor, because lse2 is rounded
    share = tl.exp2((lse2.to(tl.float64) - exact_lse2).to(tl.float32))

    row_factor = tl.zeros((BLOCK_N,), tl.float32)
    if tokens.grad_lse is not None:
        row_factor += of_tokens(tokens.grad_lse, token, mask)
    if tokens.grad_expected_log_prob is not None:
        grad_expected = of_tokens(tokens.grad_expected_log_prob, token, mask)
        row_factor -= grad_expected * of_tokens(tokens.expected_log_prob, token, mask)
        # corrects for the rounding of lse2, which z2 - lse2 contains
        row_factor += grad_expected / LOG2E * (lse2.to(tl.float64) - exact_lse2).to(tl.float32)
    row_factor *= share
    tl.store(rows.reference_logit + i, lse2, mask=mask)
    tl.store(rows.row_factor + i, row_factor * scale, mask=mask)
    if tokens.grad_expected_log_prob is not None:
        shift_factor = grad_expected / LOG2E * share
        tl.store(rows.shift_factor + i, shift_factor * scale, mask=mask)
    if tokens.grad_logit_sum is not None:
        sum_factor = of_tokens(tokens.grad_logit_sum, token, mask)
        tl.store(rows.sum_factor + i, sum_factor * scale, mask=mask)
    if entry_ptr is not None:
        column = tl.load(at_target.column + i, mask=mask, other=-1)
        target_logit2 = tl.load(at_target.logit + i, mask=mask, other=0.0)
        entry = row_factor
        if tokens.grad_expected_log_prob is not None:
            # p log p of a target that a bias of -inf switches off is 0, not 0 * -inf
            distance = target_logit2 - lse2
            entry += shift_factor * tl.where(distance < -1e4, -1e4, distance)
        entry *= tl.exp2(target_logit2 - lse2)
        if tokens.grad_target_logit is not None:
            entry += tl.where(column >= 0, of_tokens(tokens.grad_target_logit, token, mask), 0.0)
        if tokens.grad_logit_sum is not None:
            if rows.class_weight is not None:
                sum_factor *= tl.load(rows.class_weight + tl.where(column >= 0, column, 0), mask=mask, other=0.0)
            entry += sum_factor
        if at_target.dz_du is not None:
            entry *= tl.load(at_target.dz_du + i, mask=mask, other=0.0)
        entry *= scale
        tl.store(entry_ptr + i, entry, mask=mask)
        tl.store(residual_ptr + i, entry - entry.to(HALF).to(tl.float32), mask=mask)


@Kernel
def topk_entries_kernel(
    rows,  # Gradient
    at_target,  # AtTarget, (n, K)
    grad_ptr,  # (N, K), a; None for 0
    entry_ptr,  # (n, K) out, float32
    residual_ptr,  # (n,) out, what rounding takes from the largest entry
    largest_ptr,  # (n,) out, int64, the column of the largest entry
    logit_numbers,  # LogitNumbers
    valid_tokens,  # ValidTokens
    HALF: tl.constexpr,  # dtype of G
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    row = tl.program_id(0)
    if row < valid_rows(valid_tokens, tl.num_programs(0)):
        of_row = row.to(tl.int64) * TOPK
        lse2, row_factor = tl.load(rows.reference_logit + row), tl.load(rows.row_factor + row)
        scale = scale_of(logit_numbers, tl.load(valid_tokens.order + row), row >= 0)
        size, largest = tl.full((), -1.0, tl.float32), tl.full((), 0.0, tl.float32)
        column_of_largest = tl.full((), -1, tl.int64)
        for start in range(0, TOPK, BLOCK_TOPK):
            k = start + tl.arange(0, BLOCK_TOPK)
            inside = k < TOPK
            distance = tl.load(at_target.logit + of_row + k, mask=inside, other=0.0) - lse2
            column = tl.load(at_target.column + of_row + k, mask=inside, other=-1)
            entry = tl.full((BLOCK_TOPK,), 0.0, tl.float32) + row_factor
            if rows.shift_factor is not None:
                # p log p of a class that a bias of -inf switches off is 0, not 0 * -inf
                entry += tl.load(rows.shift_factor + row) * tl.where(distance < -1e4, -1e4, distance)
            entry *= tl.exp2(distance)
            if rows.sum_factor is not None:
                weight = 1.0
                if rows.class_weight is not None:
                    weight = tl.load(rows.class_weight + column, mask=column >= 0, other=0.0)
                entry += tl.load(rows.sum_factor + row) * weight
            if grad_ptr is not None:
                token = tl.load(valid_tokens.order + row).to(tl.int64)
                equals = sum_of_equals(column, at_target.column + of_row, grad_ptr + token * TOPK, TOPK, BLOCK_TOPK)
                entry += scale * equals
            if at_target.dz_du is not None:
                entry *= tl.load(at_target.dz_du + of_row + k, mask=inside, other=0.0)
            tl.store(entry_ptr + of_row + k, entry, mask=inside)
            size, largest, column_of_largest = larger_entry(size, largest, column_of_largest, entry, column, BLOCK_TOPK)
        tl.store(residual_ptr + row, largest - largest.to(HALF).to(tl.float32))
        tl.store(largest_ptr + row, column_of_largest)


def launch_gradient_factors(
    tokens: KnownRows,
    at_target: AtTarget,
    class_weight: Tensor | None,  # (V,) float32
    dtype: torch.dtype,  # of G
    valid_tokens: ValidTokens,
    *,
    logit_options: LogitOptions,
) -> tuple[Gradient, Tensor, Tensor, Tensor]:
    """Returns the epilogue's operands, G at the target in float32, what rounding takes from it, and its column.

    (n,) each. With several classes per token G is (n, K), and the last two belong to the largest entry.
    """
    column = at_target.column
    n, topk = column.shape[0], column.dim() == 2
    lse2, row_factor, entry, residual, sum_factor, shift_factor = row_vectors(tokens.lse, 6, n)
    rows = Gradient(
        lse2,
        row_factor,
        class_weight,
        None if tokens.grad_logit_sum is None else sum_factor,
        None if tokens.grad_expected_log_prob is None else shift_factor,
    )
    half = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
    gradient_factors_kernel[(triton.cdiv(n, BLOCK_N),)](
        tokens,
        at_target,
        rows,
        None if topk else entry,
        residual,
        numbers_in_kernel(logit_options),
        valid_tokens,
        n,
        HALF=half,
        BLOCK_N=BLOCK_N,
        num_warps=2,
    )
    if topk:
        entry, largest = at_target.logit.new_empty(at_target.logit.shape), column.new_empty(n)
        topk_entries_kernel[(n,)](
            rows,
            at_target,
            tokens.grad_target_logit,
            entry,
            residual,
            largest,
            numbers_in_kernel(logit_options),
            valid_tokens,
            HALF=half,
            TOPK=column.shape[1],
            BLOCK_TOPK=topk_at_a_time(column.shape[1]),
            num_warps=2,
        )
        column = largest
    return rows, entry, residual, column
