"""Gathers the valid tokens of a chunk side by side, and computes their target's logit, the reference of the
exponentials.

                D                  D                 D
           ┌─────────┐        ┌─────────┐       ┌─────────┐
           │         │   1    │ ▓▓▓▓▓▓▓ │       │         │
         1 │ ▓▓▓▓▓▓▓ │  --->  │ ░░░░░░░ │   ·   │ ███████ │ target
         4 │ ░░░░░░░ │   4    │ 0 0 0 0 │       │         │
           └─────────┘        └─────────┘       └─────────┘
            input              rows              linear_weight

With a softcap it also computes dz/du at that logit, since the target's entry of the gradient is made outside of the
GEMM's epilogue.

A soft target names K classes. A second kernel computes their logits from the gathered rows. The largest logit is the
reference:

                D                         D
           ┌─────────┐               ┌─────────┐
         i │ ███████ │       ·     y │ ▓▓▓▓▓▓▓ │      z_iyk for the K rows y_ik of linear_weight that token i names
           └─────────┘             y │ ░░░░░░░ │
             rows                    └─────────┘
                                    linear_weight

This reads n K D numbers: 2 GiB at 4096x4096 with K = 64 in bfloat16. Rows of classes that several tokens name come from
the L2.

Other kernels with K classes a token take helpers from here: the summed weight of equal classes, and the largest entry.
A row's targets are processed topk_at_a_time. Equal classes of a token name one entry of its row. Each of them computes
the whole entry, in the same order, and all write the same number. So no atomics are needed, and every run has the same
bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import next_power_of_2
from ..gemm.epilogues import ReferenceClass
from ..gemm.tiles import load_tile, matrix_of
from ..kernel import Kernel
from .logit_numbers import base2_logits, loaded
from .valid_tokens import ROW_MULTIPLE, ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes of each, D hidden, V vocabulary


def topk_at_a_time(topk: int) -> int:
    """The number of targets that are processed at a time. Each of them is compared with as many others: 64 x 64
    comparisons for K = 64.
    """
    return min(64, next_power_of_2(topk))


@triton.jit
def sum_of_equals(
    column,  # (BLOCK_TOPK,)
    column_ptr,  # (K,), all columns of the row
    value_ptr,  # (K,)
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """For each of `column`: the sum of the values of all targets of the row with that class."""
    total = tl.zeros((BLOCK_TOPK,), tl.float32)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = k < TOPK
        others = tl.load(column_ptr + k, mask=inside, other=-1)
        values = tl.load(value_ptr + k, mask=inside, other=0.0)
        total += tl.sum(tl.where(column[:, None] == others[None, :], values[None, :], 0.0), 1)
    return total


@triton.jit
def larger_entry(
    size,  # (), magnitude of the largest entry so far; `entry` and `column` belong to it
    entry,
    column,
    entries,  # (BLOCK_TOPK,)
    columns,  # (BLOCK_TOPK,), -1 for none
    BLOCK_TOPK: tl.constexpr,
):
    """Returns the entry of largest magnitude and its column, the first of equals. Entries of nan are skipped."""
    sizes = tl.where((columns >= 0) & (entries == entries), tl.abs(entries), -1.0)
    largest = tl.max(sizes, 0)
    place = tl.arange(0, BLOCK_TOPK)
    at_largest = place == tl.min(tl.where(sizes == largest, place, BLOCK_TOPK), 0)
    larger = largest > size
    entry = tl.where(larger, tl.sum(tl.where(at_largest, entries, 0.0), 0), entry)
    column = tl.where(larger, tl.sum(tl.where(at_largest, columns, 0), 0), column)
    return tl.where(larger, largest, size), entry, column


BLOCK_TOPK = 4  # targets at a time: 4 x 1024 products fill 32 registers of a thread


class AtTarget(NamedTuple):
    """Numbers of the valid tokens, (n,) each; the first three are (n, K) for soft targets. Passed to kernels as one
    argument.
    """

    logit: Tensor  # base 2
    dz_du: Tensor | None  # with a softcap: dz/du / logit_scale at `logit`
    column: Tensor  # int64, the target's column; -1 if this rank does not have it
    reference_class: ReferenceClass
    reference: Tensor  # a copy of `logit`; a rescue (steps/forward.py) changes this copy
    guard: Tensor  # () int32, 0: whether a rescue is needed


@Kernel
def gather_tokens_kernel(
    valid_tokens,  # ValidTokens
    operands,  # Operands; if its target is None, column 0 is used
    rows_ptr,  # (n, D) out, with zeros after the valid rows up to a multiple of 128
    at_target,  # AtTarget, out; without a target, its reference alone
    V,
    D,
    input_stride,  # (between tokens, between features)
    weight_stride,  # (between classes, between features)
    stride_rows_n,
    vocab_start,
    logit_numbers,  # LogitNumbers
    BLOCK_D: tl.constexpr,
):
    """One program per row. Computes z2 of the target's column, or of column 0 if this rank lacks the target."""
    row = tl.program_id(0)
    count = valid_rows(valid_tokens, tl.num_programs(0))
    if row == 0:
        tl.store(at_target.guard, 0)
    if row < count:
        token = tl.load(valid_tokens.order + row).to(tl.int64)
        column = tl.full((), 0, tl.int64)
        if operands.target is not None:
            target = tl.load(operands.target + token).to(tl.int64) - vocab_start
            hit = (target >= 0) & (target < V)
            tl.store(at_target.column + row, tl.where(hit, target, -1))
            column = tl.where(hit, target, 0)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        for start in range(0, D, BLOCK_D):
            d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            x = tl.load(operands.input + token * input_stride[0] + d * input_stride[1], mask=d < D, other=0.0)
            w_places = operands.linear_weight + column * weight_stride[0] + d * weight_stride[1]
            w = tl.load(w_places, mask=d < D, other=0.0)
            tl.store(rows_ptr + row.to(tl.int64) * stride_rows_n + d, x, mask=d < D)
            acc += x.to(tl.float32) * w.to(tl.float32)
        product = tl.sum(acc, 0)
        bias = None
        if operands.linear_bias is not None:
            bias = tl.load(operands.linear_bias + column).to(tl.float32)
        numbers = loaded(logit_numbers)
        z2, dz_du = base2_logits(product, bias, logit_numbers, numbers)
        tl.store(at_target.reference + row, z2)
        if operands.target is not None:
            tl.store(at_target.logit + row, z2)
            if logit_numbers.softcap is not None:
                tl.store(at_target.dz_du + row, dz_du)
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
    linear_weight,  # Matrix, (V, D)
    # AtTarget, out. `logit` is 0 for classes of other ranks. `reference` is the logit of column 0 on entry, and the
    # largest logit on return.
    at_target,
    V,
    D,
    stride_rows_n,
    vocab_start,
    ignore_index,
    logit_numbers,  # LogitNumbers
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0)
    if row < valid_rows(valid_tokens, tl.num_programs(0)):
        token = tl.load(valid_tokens.order + row).to(tl.int64)
        largest, column_of_largest = tl.load(at_target.reference + row), tl.full((), 0, tl.int64)
        numbers = loaded(logit_numbers)
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
                w = load_tile(linear_weight, tl.where(hit, column, 0), d, hit, d < D)
                acc += x.to(tl.float32)[None, :] * w.to(tl.float32)
            bias = None
            if operands.linear_bias is not None:
                bias = tl.load(operands.linear_bias + column, mask=hit, other=0.0).to(tl.float32)
            z2, dz_du = base2_logits(tl.sum(acc, 1), bias, logit_numbers, numbers)
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
    call: Any,  # with Operands of N tokens, and the first class where there is one
    valid_tokens: ValidTokens,
    rows: Tensor,  # (n, D) out
) -> AtTarget:
    assert rows.stride(1) == 1
    operands, logit_options, vocab_start = call.operands, call.logits, getattr(call, "vocab_start", 0)
    input, linear_weight, target = operands[:3]
    (n, hidden), block_d = rows.shape, min(1024, next_power_of_2(rows.shape[1]))
    (reference, logit), soft = row_vectors(input, 2, n), target.dim() == 2
    column = input.new_empty((n, *target.shape[1:]), dtype=torch.int64)
    if soft:
        logit = reference.new_empty(column.shape)
    at_target = AtTarget(
        logit,
        None if logit_options.softcap is None else logit.new_empty(logit.shape),
        column,
        ReferenceClass(column.new_empty(n), logit.new_empty(n)) if soft else ReferenceClass(column, logit),
        reference,
        input.new_empty((), dtype=torch.int32),
    )
    gather_tokens_kernel[(n,)](
        valid_tokens,
        operands._replace(target=None if soft else target, weight=None),
        rows,
        at_target,
        linear_weight.shape[0],
        hidden,
        input.stride(),
        linear_weight.stride(),
        rows.stride(0),
        vocab_start,
        logit_options,
        BLOCK_D=block_d,
        num_warps=4,
    )
    if not soft:
        return at_target
    topk_logits_kernel[(n,)](
        valid_tokens,
        rows,
        operands._replace(weight=None),
        matrix_of(linear_weight),
        at_target,
        linear_weight.shape[0],
        hidden,
        rows.stride(0),
        vocab_start,
        call.ignore_index,
        logit_options,
        TOPK=target.shape[1],
        BLOCK_TOPK=BLOCK_TOPK,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return at_target
