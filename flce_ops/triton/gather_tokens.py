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
from flce_ops.triton.epilogues import ReferenceClass
from flce_ops.triton.kept_tokens import ROW_MULTIPLE, Kept, kept_rows, row_vectors
from flce_ops.triton.logits_gemm import base2_logits, number_at
from flce_ops.triton.low_rank_pair import NO_PAIR, Pair, pair_logit
from flce_ops.triton.replay import Kernel
from flce_ops.triton.smoothing import ClassSum

# N tokens, n rows of a chunk, D hidden, V vocabulary


class AtTarget(NamedTuple):
    """(n,) each, of the kept tokens."""

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
    input_ptr,  # (N, D)
    weight_ptr,  # (V, D)
    bias_ptr,  # (V,)
    target_ptr,  # (N,); None for column 0 (of several classes a token, gather_slots.py)
    rows_ptr,  # (n, D) out, zeros behind the kept rows up to a multiple of 128
    logit_ptr,  # (n,) out, base 2
    reference_ptr,  # (n,) out, the same: a rescue overwrites it
    guard_ptr,  # () int32 out, 0
    dz_du_ptr,  # (n,) out, dz/du / logit_scale; written with a softcap. Or the class scale
    column_ptr,  # (n,) out, int64: the target's among these columns, -1 elsewhere
    class_sum,  # ClassSum; its fields None where no logit sum is asked for
    logit_sum_ptr,  # (n,) out, or None
    pair,  # Pair, of N tokens
    n,
    V,
    D,
    stride_input_n,
    stride_input_d,
    stride_weight_v,
    stride_weight_d,
    stride_rows_n,
    vocab_start,
    logit_options,  # LogitOptions
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,  # of the pair
):
    """One program a row: z2 of the target's column, or of column 0 where it is not among these."""
    row = tl.program_id(0)
    count = kept_rows(kept, n)
    if row == 0:
        tl.store(guard_ptr, 0)
    if row < count:
        token = tl.load(kept.order + row).to(tl.int64)
        column = tl.full((), -1, tl.int64)
        if target_ptr is not None:
            column = tl.load(target_ptr + token).to(tl.int64) - vocab_start
        hit = (column >= 0) & (column < V)
        tl.store(column_ptr + row, tl.where(hit, column, -1))
        column = tl.where(hit, column, 0)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        summed = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            x = tl.load(input_ptr + token * stride_input_n + d * stride_input_d, mask=d < D, other=0.0)
            w = tl.load(weight_ptr + column * stride_weight_v + d * stride_weight_d, mask=d < D, other=0.0)
            tl.store(rows_ptr + row.to(tl.int64) * stride_rows_n + d, x, mask=d < D)
            acc += x.to(tl.float32) * w.to(tl.float32)
            if logit_sum_ptr is not None:
                summed += x.to(tl.float32) * tl.load(class_sum.weight + d, mask=d < D, other=0.0)
        product = tl.sum(acc, 0)
        if pair.weight is not None:
            product += pair_logit(pair, token, column, RANK)
        if pair.class_scale is not None:
            class_scale = tl.load(pair.class_scale + column)
            product *= class_scale
        bias = None
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column).to(tl.float32)
        logit_scale, softcap = number_at(logit_options.logit_scale), number_at(logit_options.softcap)
        z2, dz_du = base2_logits(product, bias, logit_options, logit_scale, softcap)
        tl.store(logit_ptr + row, z2)
        tl.store(reference_ptr + row, z2)
        if pair.class_scale is not None:
            tl.store(dz_du_ptr + row, class_scale)
        elif logit_options.softcap is not None:
            tl.store(dz_du_ptr + row, dz_du)
        if logit_sum_ptr is not None:
            bias_sum = None
            if class_sum.bias is not None:
                bias_sum = tl.load(class_sum.bias)
            sum2, _ = base2_logits(tl.sum(summed, 0), bias_sum, logit_options, logit_scale, softcap)
            tl.store(logit_sum_ptr + row, sum2)
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
    input, linear_weight, target, linear_bias, _ = operands
    n, hidden = rows.shape
    logit, reference = row_vectors(input, 2, n)
    guard = input.new_empty((), dtype=torch.int32)
    scaled = pair.class_scale is not None
    assert not (scaled and logit_options.softcap is not None)
    dz_du = None if logit_options.softcap is None and not scaled else torch.empty_like(logit)
    logit_sum = None if class_sum is None else torch.empty_like(logit)
    assert class_sum is None or logit_options.softcap is None, "a sum of capped logits is not linear"
    column = input.new_empty(n, dtype=torch.int64)
    gather_tokens_kernel[(n,)](
        kept,
        input,
        linear_weight,
        linear_bias,
        target if target.dim() == 1 else None,
        rows,
        logit,
        reference,
        guard,
        dz_du,
        column,
        class_sum or ClassSum(None, None),
        logit_sum,
        pair,
        n,
        linear_weight.shape[0],
        hidden,
        *input.stride(),
        *linear_weight.stride(),
        rows.stride(0),
        vocab_start,
        logit_options,
        BLOCK_D=min(1024, triton.next_power_of_2(hidden)),
        RANK=pair.rank,
        num_warps=4,
    )
    return AtTarget(logit, dz_du, column, ReferenceClass(column, logit), reference, guard, logit_sum)
