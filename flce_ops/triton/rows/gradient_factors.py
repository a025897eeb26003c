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
from ...objectives.in_triton import number
from ...support.sizes import cdiv
from ..gemm.epilogues import Gradient
from ..kernel import Kernel
from .gather_tokens import AtTarget, larger_entry, sum_of_equals, topk_at_a_time
from .logit_numbers import LOG2E
from .valid_tokens import ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes, V vocabulary, C columns

ENTRIES = tl.constexpr(128)  # that a program sets
ROWS = tl.constexpr(64)  # of a program


class KnownRows(NamedTuple):
    """Forward's numbers and the cotangents of all tokens, (N,) each, in the order of all tokens; None if absent."""

    lse_pair: Tensor | None = None  # (N, 2)
    expected_log_prob: Tensor | None = None
    grad_target_logit: Tensor | None = None  # (N, K) with several classes per token
    grad_lse: Tensor | None = None
    grad_logit_sum: Tensor | None = None
    grad_expected_log_prob: Tensor | None = None


@triton.jit
def of_tokens(pointer, token, mask):
    return tl.load(pointer + token, mask=mask, other=0.0)


@Kernel
def gradient_factors_kernel(
    tokens,  # KnownRows
    at_target,  # AtTarget
    rows,  # Gradient, out, its class weights apart
    entry_ptr,  # (n,) or (n, K) out, float32: G at the targets
    residual_ptr,  # (n,) out, what rounding takes from it; with soft targets, from the largest entry
    largest_ptr,  # (n,) out, int64, the column of the largest entry, with soft targets
    logit_numbers,  # LogitNumbers
    valid_tokens,  # ValidTokens
    n,
    HALF: tl.constexpr,  # dtype of G
    TOPK: tl.constexpr,
    SOFT: tl.constexpr,  # tokens have K classes (K may be 1)
    BLOCK_TOPK: tl.constexpr,
):
    """A program takes ROWS rows with one target each, or one row with BLOCK_TOPK targets at a time."""
    BLOCK_N: tl.constexpr = 1 if SOFT else ROWS
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < valid_rows(valid_tokens, n)
    token = tl.load(valid_tokens.order + i, mask=mask, other=0)
    row_topk, token_topk = i.to(tl.int64) * TOPK, token.to(tl.int64) * TOPK
    scale = number(logit_numbers.logit_scale, 1.0)

    reference, log_sum = of_tokens(tokens.lse_pair, 2 * token, mask), of_tokens(tokens.lse_pair, 2 * token + 1, mask)
    log2e = tl.full((BLOCK_N,), 1.4426950408889634, tl.float64)
    exact_lse2 = (reference.to(tl.float64) + log_sum.to(tl.float64)) * log2e
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

    size, largest = tl.full((), -1.0, tl.float32), tl.full((), 0.0, tl.float32)
    column_of_largest = tl.full((), -1, tl.int64)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & mask
        column = tl.load(at_target.column + row_topk + k, mask=inside, other=-1)
        distance = tl.load(at_target.logit + row_topk + k, mask=inside, other=0.0) - lse2
        entry = row_factor
        if tokens.grad_expected_log_prob is not None:
            # p log p of a target that a bias of -inf switches off is 0, not 0 * -inf
            entry = entry + shift_factor * tl.where(distance < -1e4, -1e4, distance)
        entry = entry * tl.exp2(distance)
        if tokens.grad_target_logit is not None:
            if SOFT:
                grads = tokens.grad_target_logit + token_topk
                entry += sum_of_equals(column, at_target.column + row_topk, grads, TOPK, BLOCK_TOPK)
            else:
                entry += tl.where(column >= 0, of_tokens(tokens.grad_target_logit, token, mask), 0.0)
        if tokens.grad_logit_sum is not None:
            weight = 1.0
            if rows.class_weight is not None:
                weight = tl.load(rows.class_weight + column, mask=column >= 0, other=0.0)
            entry += sum_factor * weight
        if at_target.dz_du is not None:
            entry *= tl.load(at_target.dz_du + row_topk + k, mask=inside, other=0.0)
        entry *= scale
        tl.store(entry_ptr + row_topk + k, entry, mask=inside)
        if SOFT:
            size, largest, column_of_largest = larger_entry(size, largest, column_of_largest, entry, column, BLOCK_TOPK)
        else:
            tl.store(residual_ptr + i, entry - entry.to(HALF).to(tl.float32), mask=mask)
    if SOFT:
        tl.store(residual_ptr + i, largest - largest.to(HALF).to(tl.float32), mask=mask)
        tl.store(largest_ptr + i, column_of_largest, mask=mask)


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
    column, soft = at_target.column, at_target.column.dim() == 2
    n, topk = column.shape[0], column.shape[1] if soft else 1
    lse2, row_factor, residual, sum_factor, shift_factor = row_vectors(tokens.lse_pair, 5, n)
    rows = Gradient(
        lse2,
        row_factor,
        class_weight,
        None if tokens.grad_logit_sum is None else sum_factor,
        None if tokens.grad_expected_log_prob is None else shift_factor,
    )
    entry, largest = lse2.new_empty(column.shape), column.new_empty(n) if soft else None
    of_rows = tokens, at_target, rows, entry, residual, largest
    gradient_factors_kernel[(n if soft else cdiv(n, ROWS.value),)](
        *(*of_rows, logit_options, valid_tokens, n),
        HALF={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype],
        TOPK=topk,
        SOFT=soft,
        BLOCK_TOPK=topk_at_a_time(topk),
        num_warps=2,
    )
    return rows, entry, residual, column if largest is None else largest


@Kernel
def set_entries_kernel(
    matrix_ptr,  # (n, C)
    column_ptr,  # (n, K)
    value_ptr,  # (n, K)
    valid_tokens,  # ValidTokens
    n,
    C,
    stride_n,
    TOPK: tl.constexpr,
):
    """matrix[i, column_ik] = value_ik for valid tokens. Columns outside of the matrix, such as -1, are skipped. Equal
    columns of a row have equal values.
    """
    places = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    rows = places // TOPK
    mask = rows < valid_rows(valid_tokens, n)
    column = tl.load(column_ptr + places, mask=mask, other=-1)
    value = tl.load(value_ptr + places, mask=mask, other=0.0)
    inside = mask & (column >= 0) & (column < C)
    tl.store(matrix_ptr + rows.to(tl.int64) * stride_n + column, value.to(matrix_ptr.dtype.element_ty), mask=inside)


def launch_set_entries(matrix: Tensor, column: Tensor, value: Tensor, valid_tokens: ValidTokens) -> None:
    """`column` and `value` are (n,) or (n, K)."""
    assert matrix.stride(1) == 1
    (rows, columns), places = matrix.shape, 1 if column.dim() == 1 else column.shape[1]
    of_matrix = matrix, column, value, valid_tokens, rows, columns, matrix.stride(0)
    set_entries_kernel[(cdiv(rows * places, ENTRIES.value),)](*of_matrix, TOPK=places)
