"""finish_rows.py for soft targets: K entries of a row differ from c E, those of the classes that the token names.

With f_k = (1 - eps) q_k w_yk, l = g d_lse and p = E / Z, without label smoothing

    loss = sum_k f_k (lse - z_yk)                                                    d_lse = sum_k f_k
    G_ij = (l p_ij - g sum_(k: y_k = j) f_k) dz/du = c E'_ij                         c = l logit_scale / Z
                                       E'_iyk = (E_iyk - Z sum_(equal k) f_k / d_lse) dz/du,  E' = E elsewhere

Of what rounding takes from the K entries, that of the largest is given back, as a target's is: it is the one that may
dominate the row, and giving back all of them would read K rows of linear_weight again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens, empty_rows, store_and_scale
from flce_ops.triton.kept_tokens import kept_rows
from flce_ops.triton.logits_gemm import LN2
from flce_ops.triton.replay import Kernel
from flce_ops.triton.row_loss import RowLoss, row_loss
from flce_ops.triton.slots import larger_entry, slots_at_a_time, sum_of_equals

# N tokens, n rows of a chunk, K slots


@Kernel
@triton.jit
def finish_soft_rows_kernel(
    tokens,  # Tokens; target_logit, target_dz_du and column (n, K), target_weight (N, K), q_k w_yk
    sums,  # RowSums
    finished,  # FinishedRows, out; entry (n, K)
    n,
    loss,  # RowLoss
    logit_scale_ptr,  # ()
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program a row; `i` and what is made of it are vectors of one number, as the functions it shares take them."""
    i = tl.program_id(0) + tl.arange(0, 1)
    mask = i < kept_rows(tokens.kept, n)
    token = tl.load(tokens.kept.order + i, mask=i < n, other=0)
    of_row, of_token = i.to(tl.int64) * SLOTS, token.to(tl.int64) * SLOTS
    reference_logit = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)

    mass = tl.zeros((1,), tl.float32)  # sum_k q_k w_yk
    distance = tl.zeros((1,), tl.float32)  # sum_k q_k w_yk (r - z_yk)
    for start in range(0, SLOTS, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        inside = (slot < SLOTS) & mask
        weight = tl.load(tokens.target_weight + of_token + slot, mask=inside, other=0.0)
        logit = tl.load(tokens.target_logit + of_row + slot, mask=inside, other=0.0)
        hit = tl.load(tokens.column + of_row + slot, mask=inside, other=-1) >= 0
        # a slot's share was summed from another order of the same products
        row_sum = tl.maximum(
            row_sum,
            tl.max(tl.where(hit, tl.exp2(logit - reference_logit), 0.0), 0),
            propagate_nan=tl.PropagateNan.ALL,
        )
        mass += tl.sum(weight, 0)
        distance += tl.sum(tl.where(weight == 0.0, 0.0, weight * (reference_logit - logit)), 0)

    log2_sum = tl.log2(row_sum)
    logit_sum2 = None
    if sums.logit_sum is not None:
        logit_sum2 = tl.load(sums.logit_sum + i, mask=mask, other=0.0)
    value, d_lse, d_target = row_loss(0.0, reference_logit + log2_sum, logit_sum2, mass, loss)
    keep = 1.0 - loss.options.label_smoothing
    value += keep * (distance + mass * log2_sum) * LN2
    scaled_d_lse, d_lse, _ = store_and_scale(tokens, token, i, n, mask, value, d_lse, d_target, logit_scale_ptr)
    row_factor = scaled_d_lse / row_sum

    size, largest = tl.full((), -1.0, tl.float32), tl.full((), 0.0, tl.float32)
    column_of_largest = tl.full((), -1, tl.int64)
    for start in range(0, SLOTS, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        inside = (slot < SLOTS) & mask
        logit = tl.load(tokens.target_logit + of_row + slot, mask=inside, other=0.0)
        column = tl.load(tokens.column + of_row + slot, mask=inside, other=-1)
        weight = sum_of_equals(column, tokens.column + of_row, tokens.target_weight + of_token, SLOTS, BLOCK_S)
        entry = tl.exp2(logit - reference_logit) - row_sum * keep * weight / d_lse
        # a row factor of inf (a normalizer of 0) makes it inf - inf
        entry = tl.where(tl.abs(row_factor) == float("inf"), float("nan"), entry)
        if tokens.target_dz_du is not None:
            entry *= tl.load(tokens.target_dz_du + of_row + slot, mask=inside, other=0.0)
        tl.store(finished.entry + of_row + slot, entry.to(finished.entry.dtype.element_ty), mask=inside)
        size, largest, column_of_largest = larger_entry(size, largest, column_of_largest, entry, column, BLOCK_S)

    rounded = largest.to(finished.entry.dtype.element_ty).to(tl.float32)
    correction = tl.where(tl.abs(rounded) > 0.0, largest / rounded, 1.0)
    tl.store(finished.row_factor + i, row_factor, mask=mask)
    tl.store(finished.weight_factor + i, row_factor * correction, mask=mask)
    tl.store(finished.residual + i, row_factor * (largest - rounded), mask=mask)
    tl.store(finished.column + i, column_of_largest, mask=mask)


def launch_finish_soft_rows(
    tokens: Tokens,
    sums: RowSums,
    loss: RowLoss,
    dtype: torch.dtype,  # of E
    *,
    logit_scale: Tensor | None,  # ()
) -> FinishedRows:
    n, slots = tokens.column.shape
    finished = empty_rows(tokens, dtype)._replace(
        entry=tokens.losses.new_empty(n, slots, dtype=dtype), column=tokens.column.new_empty(n)
    )
    finish_soft_rows_kernel[(n,)](
        tokens, sums, finished, n, loss, logit_scale, SLOTS=slots, BLOCK_S=slots_at_a_time(slots), num_warps=2
    )
    return finished
