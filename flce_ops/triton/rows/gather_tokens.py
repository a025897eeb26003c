"""The kept tokens of a chunk, side by side, with their target's logit: the reference of the exponentials.

                D                  D                 D
           ┌─────────┐        ┌─────────┐       ┌─────────┐
           │         │   1    │ ▓▓▓▓▓▓▓ │       │         │
         1 │ ▓▓▓▓▓▓▓ │  --->  │ ░░░░░░░ │   ·   │ ███████ │ target
         4 │ ░░░░░░░ │   4    │ 0 0 0 0 │       │         │
           └─────────┘        └─────────┘       └─────────┘
            input              rows              linear_weight

And dz/du there, for the target's entry of the gradient, which is made apart from the GEMM's epilogue; and where asked
for, the logit sum, which takes one more product of the row (smoothing.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.options import LogitOptions, Operands
from flce_ops.objectives.in_triton import number
from flce_ops.triton.gemm.epilogues import ReferenceClass
from flce_ops.triton.gemm.logits_gemm import base2_logits
from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.kept_tokens import ROW_MULTIPLE, Kept, kept_rows, row_vectors
from flce_ops.triton.rows.smoothing import ClassSum
from flce_ops.triton.steps.low_rank_pair import NO_PAIR, Pair, pair_logit

# N tokens, n rows of a chunk, D hidden, V vocabulary


class AtTarget(NamedTuple):
    """(n,) each, of the kept tokens; one argument of a kernel."""

    logit: Tensor  # base 2
    dz_du: Tensor | None  # dz/du / logit_scale there, with a softcap, or the class scale
    column: Tensor  # int64, the target's, -1 if it is not here
    reference_class: ReferenceClass
    reference: Tensor  # a copy of `logit`, for a rescue to change
    guard: Tensor  # () int32, 0
    logit_sum: Tensor | None  # base 2, sum_j w_j z_j, where asked for


@Kernel
@triton.jit
def gather_tokens_kernel(
    kept,  # Kept
    operands,  # Operands; without a target column 0 (of several classes a token, gather_slots.py)
    rows_ptr,  # (n, D) out, zeros behind the kept rows up to a multiple of 128
    at_target,  # AtTarget, out
    class_sum,  # ClassSum; its fields None where no logit sum is asked for
    pair,  # Pair, of N tokens
    V,
    D,
    input_stride,  # of tokens and features
    weight_stride,  # of classes and features
    stride_rows_n,
    vocab_start,
    logit_options,  # LogitOptions
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,  # of the pair
):
    """One program a row: z2 of the target's column, or of column 0 where it is not among these."""
    row = tl.program_id(0)
    count = kept_rows(kept, tl.num_programs(0))
    if row == 0:
        tl.store(at_target.guard, 0)
    if row < count:
        token = tl.load(kept.order + row).to(tl.int64)
        column = tl.full((), -1, tl.int64)
        if operands.target is not None:
            column = tl.load(operands.target + token).to(tl.int64) - vocab_start
        hit = (column >= 0) & (column < V)
        tl.store(at_target.column + row, tl.where(hit, column, -1))
        column = tl.where(hit, column, 0)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        summed = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            x = tl.load(operands.input + token * input_stride[0] + d * input_stride[1], mask=d < D, other=0.0)
            w_places = operands.linear_weight + column * weight_stride[0] + d * weight_stride[1]
            w = tl.load(w_places, mask=d < D, other=0.0)
            tl.store(rows_ptr + row.to(tl.int64) * stride_rows_n + d, x, mask=d < D)
            acc += x.to(tl.float32) * w.to(tl.float32)
            if at_target.logit_sum is not None:
                summed += x.to(tl.float32) * tl.load(class_sum.weight + d, mask=d < D, other=0.0)
        product = tl.sum(acc, 0)
        if pair.weight is not None:
            product += pair_logit(pair, token, column, RANK)
        if pair.class_scale is not None:
            class_scale = tl.load(pair.class_scale + column)
            product *= class_scale
        bias = None
        if operands.linear_bias is not None:
            bias = tl.load(operands.linear_bias + column).to(tl.float32)
        logit_scale, softcap = number(logit_options.logit_scale), number(logit_options.softcap)
        z2, dz_du = base2_logits(product, bias, logit_options, logit_scale, softcap)
        tl.store(at_target.logit + row, z2)
        tl.store(at_target.reference + row, z2)
        if pair.class_scale is not None:
            tl.store(at_target.dz_du + row, class_scale)
        elif logit_options.softcap is not None:
            tl.store(at_target.dz_du + row, dz_du)
        if at_target.logit_sum is not None:
            bias_sum = None
            if class_sum.bias is not None:
                bias_sum = tl.load(class_sum.bias)
            sum2, _ = base2_logits(tl.sum(summed, 0), bias_sum, logit_options, logit_scale, softcap)
            tl.store(at_target.logit_sum + row, sum2)
    elif row < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE:
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            zeros = tl.zeros((BLOCK_D,), rows_ptr.dtype.element_ty)
            tl.store(rows_ptr + row.to(tl.int64) * stride_rows_n + d, zeros, mask=d < D)


def launch_gather_tokens(
    kept: Kept,
    operands: Operands,  # of N tokens
    logit_options: LogitOptions,
    rows: Tensor,  # (n, D) out
    *,
    vocab_start: int,
    class_sum: ClassSum | None = None,
    pair: Pair = NO_PAIR,  # of N tokens
) -> AtTarget:
    assert rows.stride(1) == 1
    input, linear_weight = operands[:2]
    n, hidden = rows.shape
    logit, reference = row_vectors(input, 2, n)
    guard = input.new_empty((), dtype=torch.int32)
    scaled = pair.class_scale is not None
    assert not (scaled and logit_options.softcap is not None)
    dz_du = None if logit_options.softcap is None and not scaled else logit.new_empty(logit.shape)
    logit_sum = None if class_sum is None else logit.new_empty(logit.shape)
    assert class_sum is None or logit_options.softcap is None, "a sum of capped logits is not linear"
    column = input.new_empty(n, dtype=torch.int64)
    at_target = AtTarget(logit, dz_du, column, ReferenceClass(column, logit), reference, guard, logit_sum)
    gather_tokens_kernel[(n,)](
        kept,
        operands._replace(target=operands.target if operands.target.dim() == 1 else None, weight=None),
        rows,
        at_target,
        class_sum or ClassSum(None, None),
        pair,
        linear_weight.shape[0],
        hidden,
        input.stride(),
        linear_weight.stride(),
        rows.stride(0),
        vocab_start,
        logit_options,
        BLOCK_D=min(1024, triton.next_power_of_2(hidden)),
        RANK=pair.rank,
        num_warps=4,
    )
    return at_target
