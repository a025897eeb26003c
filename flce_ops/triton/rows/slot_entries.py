"""G at the K classes that a token of a soft target names, from the factors of its row (gradient_factors.py).

    G_iyk = ((row_factor_i + shift_factor_i (z_iyk - lse_i)) p_iyk + sum_factor_i w_yk + sum_(equal k) a_ik) dz/du_iyk

The factors are those of the epilogue, times logit_scale; a is the cotangent of the slots' logits.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.objectives.in_triton import number
from flce_ops.triton.gemm.epilogues import Gradient
from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.gather_tokens import AtTarget
from flce_ops.triton.rows.kept_tokens import Kept, kept_rows
from flce_ops.triton.rows.slots import larger_entry, slots_at_a_time, sum_of_equals

# N tokens, n rows of a chunk, K slots, V vocabulary


@Kernel
@triton.jit
def slot_entries_kernel(
    rows,  # Gradient
    at_target,  # AtTarget, (n, K)
    grad_ptr,  # (N, K), a; None for 0
    entry_ptr,  # (n, K) out, float32
    residual_ptr,  # (n,) out, what rounding the largest of them takes
    largest_ptr,  # (n,) out, int64, its column
    logit_scale_ptr,  # ()
    kept,  # Kept
    HALF: tl.constexpr,  # dtype of G
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    if row < kept_rows(kept, tl.num_programs(0)):
        of_row = row.to(tl.int64) * SLOTS
        lse2, row_factor = tl.load(rows.reference_logit + row), tl.load(rows.row_factor + row)
        scale = number(logit_scale_ptr)
        size, largest = tl.full((), -1.0, tl.float32), tl.full((), 0.0, tl.float32)
        column_of_largest = tl.full((), -1, tl.int64)
        for start in range(0, SLOTS, BLOCK_S):
            slot = start + tl.arange(0, BLOCK_S)
            inside = slot < SLOTS
            distance = tl.load(at_target.logit + of_row + slot, mask=inside, other=0.0) - lse2
            column = tl.load(at_target.column + of_row + slot, mask=inside, other=-1)
            entry = tl.full((BLOCK_S,), 0.0, tl.float32) + row_factor
            if rows.shift_factor is not None:
                # a class that a bias of -inf switches off has p log p = 0, not 0 * -inf
                entry += tl.load(rows.shift_factor + row) * tl.where(distance < -1e4, -1e4, distance)
            entry *= tl.exp2(distance)
            if rows.sum_factor is not None:
                weight = 1.0
                if rows.class_weight is not None:
                    weight = tl.load(rows.class_weight + column, mask=column >= 0, other=0.0)
                entry += tl.load(rows.sum_factor + row) * weight
            if grad_ptr is not None:
                token = tl.load(kept.order + row).to(tl.int64)
                equals = sum_of_equals(column, at_target.column + of_row, grad_ptr + token * SLOTS, SLOTS, BLOCK_S)
                entry += scale * equals
            if at_target.dz_du is not None:
                entry *= tl.load(at_target.dz_du + of_row + slot, mask=inside, other=0.0)
            tl.store(entry_ptr + of_row + slot, entry, mask=inside)
            size, largest, column_of_largest = larger_entry(size, largest, column_of_largest, entry, column, BLOCK_S)
        tl.store(residual_ptr + row, largest - largest.to(HALF).to(tl.float32))
        tl.store(largest_ptr + row, column_of_largest)


def launch_slot_entries(
    rows: Gradient,
    at_target: AtTarget,
    grad_target_logit: Tensor | None,  # (N, K)
    dtype: tl.dtype,  # of G
    kept: Kept,
    *,
    logit_scale: Tensor | None,  # ()
) -> tuple[Tensor, Tensor, Tensor]:
    """G at the slots (n, K) in float32, what rounding the largest of a row takes (n,), and its column (n,)."""
    logit, column = at_target.logit, at_target.column
    n, slots = column.shape
    entry, residual, largest = logit.new_empty(logit.shape), logit.new_empty(n), column.new_empty(n)
    slot_entries_kernel[(n,)](
        rows,
        at_target,
        grad_target_logit,
        entry,
        residual,
        largest,
        logit_scale,
        kept,
        HALF=dtype,
        SLOTS=slots,
        BLOCK_S=slots_at_a_time(slots),
        num_warps=2,
    )
    return entry, residual, largest
