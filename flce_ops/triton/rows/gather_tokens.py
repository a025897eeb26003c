"""The valid tokens of a chunk, side by side, with their target's logit: the reference of the exponentials.

                D                  D                 D
           ┌─────────┐        ┌─────────┐       ┌─────────┐
           │         │   1    │ ▓▓▓▓▓▓▓ │       │         │
         1 │ ▓▓▓▓▓▓▓ │  --->  │ ░░░░░░░ │   ·   │ ███████ │ target
         4 │ ░░░░░░░ │   4    │ 0 0 0 0 │       │         │
           └─────────┘        └─────────┘       └─────────┘
            input              rows              linear_weight

And dz/du there, for the target's entry of the gradient, which is made apart from the GEMM's epilogue; and where asked
for, the logit sum, which takes one more product of the row (smoothing.py).

A soft target names K classes. Their logits are made beside the gathered tokens, and the largest is the reference:

                D                         D
           ┌─────────┐               ┌─────────┐
         i │ ███████ │       ·     y │ ▓▓▓▓▓▓▓ │      z_iyk for the K rows y_ik of linear_weight that token i names
           └─────────┘             y │ ░░░░░░░ │
             rows                    └─────────┘
                                    linear_weight

K rows a token are n K D numbers: at 4096x4096 and K = 64, bfloat16, 2 GiB, of which the L2 has what tokens share.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions, Operands
from ..gemm.epilogues import ReferenceClass
from ..gemm.logits_gemm import base2_logits
from ..gemm.tma import load_tile
from ..launch.replay import Kernel
from ..steps.low_rank_pair import NO_PAIR, Pair, pair_logit
from .logit_numbers import numbers_in_kernel, numbers_of
from .smoothing import ClassSum
from .valid_tokens import ROW_MULTIPLE, ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes, D hidden, V vocabulary

BLOCK_TOPK = 4  # targets at a time: 4 x 1024 products are 32 registers of a thread


class AtTarget(NamedTuple):
    """(n,) each, of the valid tokens; the first three (n, K) of a soft target. One argument of a kernel."""

    logit: Tensor  # base 2
    dz_du: Tensor | None  # dz/du / logit_scale there, with a softcap, or the class scale
    column: Tensor  # int64, the target's, -1 if it is not here
    reference_class: ReferenceClass
    reference: Tensor  # a copy of `logit`, for a rescue to change
    guard: Tensor  # () int32, 0
    logit_sum: Tensor | None  # base 2, sum_j w_j z_j, where asked for


@Kernel
def gather_tokens_kernel(
    valid_tokens,  # ValidTokens
    operands,  # Operands; without a target column 0
    rows_ptr,  # (n, D) out, zeros behind the valid rows up to a multiple of 128
    at_target,  # AtTarget, out
    class_sum,  # ClassSum; its fields None where no logit sum is asked for
    pair,  # Pair, of N tokens
    V,
    D,
    input_stride,  # of tokens and features
    weight_stride,  # of classes and features
    stride_rows_n,
    vocab_start,
    logit_numbers,  # LogitNumbers
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,  # of the pair
):
    """One program a row: z2 of the target's column, or of column 0 where it is not among these."""
    row = tl.program_id(0)
    count = valid_rows(valid_tokens, tl.num_programs(0))
    if row == 0:
        tl.store(at_target.guard, 0)
    if row < count:
        token = tl.load(valid_tokens.order + row).to(tl.int64)
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
        logit_scale, softcap = numbers_of(logit_numbers, token, token >= 0)
        z2, dz_du = base2_logits(product, bias, logit_numbers, logit_scale, softcap)
        tl.store(at_target.logit + row, z2)
        tl.store(at_target.reference + row, z2)
        if pair.class_scale is not None:
            tl.store(at_target.dz_du + row, class_scale)
        elif logit_numbers.softcap is not None:
            tl.store(at_target.dz_du + row, dz_du)
        if at_target.logit_sum is not None:
            bias_sum = None
            if class_sum.bias is not None:
                bias_sum = tl.load(class_sum.bias)
            sum2, _ = base2_logits(tl.sum(summed, 0), bias_sum, logit_numbers, logit_scale, softcap)
            tl.store(at_target.logit_sum + row, sum2)
    elif row < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE:
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            zeros = tl.zeros((BLOCK_D,), rows_ptr.dtype.element_ty)
            tl.store(rows_ptr + row.to(tl.int64) * stride_rows_n + d, zeros, mask=d < D)


@Kernel
def topk_logits_kernel(
    valid_tokens,  # ValidTokens
    rows_ptr,  # (n, D) of the valid tokens
    operands,  # Operands
    at_target,  # AtTarget, out: logits of 0 where a class is not here; the reference, that of column 0, the largest
    V,
    D,
    stride_rows_n,
    weight_stride,  # of classes and features
    vocab_start,
    ignore_index,
    logit_numbers,  # LogitNumbers
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    if row < valid_rows(valid_tokens, tl.num_programs(0)):
        token = tl.load(valid_tokens.order + row).to(tl.int64)
        largest, column_of_largest = tl.load(at_target.reference + row), tl.full((), 0, tl.int64)
        logit_scale, softcap = numbers_of(logit_numbers, token, token >= 0)
        for start in range(0, TOPK, BLOCK_TOPK):
            k = start + tl.arange(0, BLOCK_TOPK)
            inside = k < TOPK
            target = tl.load(operands.target + token * TOPK + k, mask=inside, other=ignore_index).to(tl.int64)
            column = target - vocab_start
            hit = (target != ignore_index) & (column >= 0) & (column < V)
            acc = tl.zeros((BLOCK_TOPK, BLOCK_D), tl.float32)
            for first in range(0, D, BLOCK_D):
                d = first + tl.arange(0, BLOCK_D)
                x = tl.load(rows_ptr + row.to(tl.int64) * stride_rows_n + d, mask=d < D, other=0.0)
                w = load_tile(operands.linear_weight, tl.where(hit, column, 0), d, hit, d < D, *weight_stride)
                acc += x.to(tl.float32)[None, :] * w.to(tl.float32)
            bias = None
            if operands.linear_bias is not None:
                bias = tl.load(operands.linear_bias + column, mask=hit, other=0.0).to(tl.float32)
            z2, dz_du = base2_logits(tl.sum(acc, 1), bias, logit_numbers, logit_scale, softcap)
            place = row.to(tl.int64) * TOPK + k
            tl.store(at_target.logit + place, tl.where(hit, z2, 0.0), mask=inside)
            tl.store(at_target.column + place, tl.where(hit, column, -1), mask=inside)
            if logit_numbers.softcap is not None:
                tl.store(at_target.dz_du + place, dz_du, mask=inside)
            here = tl.where(hit, z2, float("-inf"))
            of_topk = tl.max(here, 0)
            column_of_topk = tl.max(tl.where(here == of_topk, column, 0), 0)
            column_of_largest = tl.where(of_topk > largest, column_of_topk, column_of_largest)
            largest = tl.maximum(largest, of_topk)
        tl.store(at_target.reference + row, largest)
        tl.store(at_target.reference_class.column + row, column_of_largest)
        tl.store(at_target.reference_class.logit + row, largest)


def launch_gather_targets(
    valid_tokens: ValidTokens,
    operands: Operands,  # of N tokens
    logit_options: LogitOptions,
    rows: Tensor,  # (n, D) out
    *,
    ignore_index: int,
    vocab_start: int,
    class_sum: ClassSum | None = None,
    pair: Pair = NO_PAIR,  # of N tokens, where a token has one class
) -> AtTarget:
    assert rows.stride(1) == 1
    input, linear_weight, target = operands[:3]
    (n, hidden), block_d = rows.shape, min(1024, triton.next_power_of_2(rows.shape[1]))
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
        valid_tokens,
        operands._replace(target=target if target.dim() == 1 else None, weight=None),
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
        numbers_in_kernel(logit_options),
        BLOCK_D=block_d,
        RANK=pair.rank,
        num_warps=4,
    )
    if target.dim() == 1:
        return at_target
    logit = reference.new_empty(n, target.shape[1])
    column = logit.new_empty(logit.shape, dtype=torch.int64)
    at_target = at_target._replace(
        logit=logit,
        dz_du=None if logit_options.softcap is None else logit.new_empty(logit.shape),
        column=column,
        reference_class=ReferenceClass(column.new_empty(n), reference.new_empty(reference.shape)),
    )
    topk_logits_kernel[(n,)](
        valid_tokens,
        rows,
        operands._replace(weight=None),
        at_target,
        linear_weight.shape[0],
        hidden,
        rows.stride(0),
        linear_weight.stride(),
        vocab_start,
        ignore_index,
        numbers_in_kernel(logit_options),
        TOPK=target.shape[1],
        BLOCK_TOPK=BLOCK_TOPK,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return at_target
