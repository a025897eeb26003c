"""Targets of K classes a token: their logits beside the gathered tokens, the largest of which is the reference.

                D                         D
           ┌─────────┐               ┌─────────┐
         i │ ███████ │       ·     y │ ▓▓▓▓▓▓▓ │      z_iyk for the K rows y_ik of linear_weight that token i names
           └─────────┘             y │ ░░░░░░░ │
             rows                    └─────────┘
                                    linear_weight

In float32, as gather_tokens.py makes a target's. K rows a token are n K D numbers: at 4096x4096 and K = 64, bfloat16,
2 GiB, of which the L2 has what tokens share.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.options import LogitOptions, Operands
from flce_ops.objectives.in_triton import number
from flce_ops.triton.gemm.epilogues import ReferenceClass
from flce_ops.triton.gemm.gemm_operands import load_tile
from flce_ops.triton.gemm.logits_gemm import base2_logits
from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.gather_tokens import AtTarget, launch_gather_tokens
from flce_ops.triton.rows.kept_tokens import Kept, kept_rows
from flce_ops.triton.rows.smoothing import ClassSum
from flce_ops.triton.steps.low_rank_pair import NO_PAIR, Pair

# N tokens, n rows of a chunk, K slots, D hidden, V vocabulary

BLOCK_S = 4  # slots at a time: 4 x 1024 products are 32 registers of a thread


@Kernel
@triton.jit
def slot_logits_kernel(
    kept,  # Kept
    rows_ptr,  # (n, D) of the kept tokens
    operands,  # Operands
    at_target,  # AtTarget, out: logits of 0 where a class is not here; the reference, that of column 0, the largest
    V,
    D,
    stride_rows_n,
    weight_stride,  # of classes and features
    vocab_start,
    ignore_index,
    logit_options,  # LogitOptions
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    if row < kept_rows(kept, tl.num_programs(0)):
        token = tl.load(kept.order + row).to(tl.int64)
        largest, column_of_largest = tl.load(at_target.reference + row), tl.full((), 0, tl.int64)
        logit_scale, softcap = number(logit_options.logit_scale), number(logit_options.softcap)
        for start in range(0, SLOTS, BLOCK_S):
            slot = start + tl.arange(0, BLOCK_S)
            inside = slot < SLOTS
            target = tl.load(operands.target + token * SLOTS + slot, mask=inside, other=ignore_index).to(tl.int64)
            column = target - vocab_start
            hit = (target != ignore_index) & (column >= 0) & (column < V)
            acc = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
            for first in range(0, D, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                x = tl.load(rows_ptr + row.to(tl.int64) * stride_rows_n + d, mask=d < D, other=0.0)
                w = load_tile(operands.linear_weight, tl.where(hit, column, 0), d, hit, d < D, *weight_stride)
                acc += x.to(tl.float32)[None, :] * w.to(tl.float32)
            bias = None
            if operands.linear_bias is not None:
                bias = tl.load(operands.linear_bias + column, mask=hit, other=0.0).to(tl.float32)
            z2, dz_du = base2_logits(tl.sum(acc, 1), bias, logit_options, logit_scale, softcap)
            place = row.to(tl.int64) * SLOTS + slot
            tl.store(at_target.logit + place, tl.where(hit, z2, 0.0), mask=inside)
            tl.store(at_target.column + place, tl.where(hit, column, -1), mask=inside)
            if logit_options.softcap is not None:
                tl.store(at_target.dz_du + place, dz_du, mask=inside)
            here = tl.where(hit, z2, float("-inf"))
            of_slots = tl.max(here, 0)
            column_of_slots = tl.max(tl.where(here == of_slots, column, 0), 0)
            column_of_largest = tl.where(of_slots > largest, column_of_slots, column_of_largest)
            largest = tl.maximum(largest, of_slots)
        tl.store(at_target.reference + row, largest)
        tl.store(at_target.reference_class.column + row, column_of_largest)
        tl.store(at_target.reference_class.logit + row, largest)


def launch_gather_targets(
    kept: Kept,
    operands: Operands,  # of N tokens
    logit_options: LogitOptions,
    rows: Tensor,  # (n, D) out
    *,
    ignore_index: int,
    vocab_start: int,
    class_sum: ClassSum | None = None,
    pair: Pair = NO_PAIR,  # where a token has one class
) -> AtTarget:
    """As launch_gather_tokens; of a target (N, K) the logits, slopes and columns are (n, K)."""
    target, linear_weight = operands.target, operands.linear_weight
    gathered = launch_gather_tokens(
        kept, operands, logit_options, rows, vocab_start=vocab_start, class_sum=class_sum, pair=pair
    )
    if target.dim() == 1:
        return gathered
    *_, reference, guard, logit_sum = gathered
    (n, hidden), slots = rows.shape, target.shape[1]
    logit = reference.new_empty(n, slots)
    dz_du = None if logit_options.softcap is None else logit.new_empty(logit.shape)
    column = target.new_empty(n, slots, dtype=torch.int64)
    reference_class = ReferenceClass(column.new_empty(n), reference.new_empty(reference.shape))
    at_target = AtTarget(logit, dz_du, column, reference_class, reference, guard, logit_sum)
    slot_logits_kernel[(n,)](
        kept,
        rows,
        operands._replace(weight=None),
        at_target,
        linear_weight.shape[0],
        hidden,
        rows.stride(0),
        linear_weight.stride(),
        vocab_start,
        ignore_index,
        logit_options,
        SLOTS=slots,
        BLOCK_S=BLOCK_S,
        BLOCK_D=min(1024, triton.next_power_of_2(hidden)),
        num_warps=4,
    )
    return at_target
