"""A row of given logits, wherever it starts: V may be odd, and then rows start between multiples of 16 bytes.

    row    |h h|g g g g g g g g|g g g g g g g g| ... |t t t|       groups of VEC numbers, 16 bytes, at multiples of 16
            head                                      tail         up to VEC - 1 numbers on either side, the edges

A program takes BLOCK_G groups at a time as a tile (BLOCK_G, VEC). A group is one load of a thread, so what is reduced
along it stays in that thread:

    online logsumexp of each of BLOCK_G groups:    m' = max(m, max_k z_k)     s' = s 2^(m - m') + sum_k 2^(z_k - m')

in base 2 (z log2 e). The groups and the edges come together once, behind the last block.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.logits_gemm import base2_logits

# N tokens, V vocabulary

# below any logit, and finite: -inf - -inf would be nan
LOWEST = tl.constexpr(-3.0e38)


class Matrix(NamedTuple):
    """(N, V) whose rows have unit stride."""

    pointer: Tensor
    stride: int  # between rows
    shift: int  # numbers that `pointer` lies behind a multiple of 16 bytes


def matrix_of(tensor: Tensor) -> Matrix:
    return Matrix(tensor, tensor.stride(0), tensor.data_ptr() % 16 // tensor.element_size())


@triton.jit
def row_of(matrix, i, V, VEC: tl.constexpr):
    """Row i: pointer, numbers of its head, groups."""
    first = i.to(tl.int64) * matrix.stride
    lead = ((first + matrix.shift) % VEC).to(tl.int32)
    head = tl.minimum((VEC - lead) % VEC, V)
    return matrix.pointer + first, head, (V - head) // VEC


@triton.jit
def numbers_of(block, BLOCK_G: tl.constexpr, VEC: tl.constexpr):
    """Of a block's groups and numbers: (BLOCK_G, 1) and (BLOCK_G, VEC), counted from the first group."""
    group = (block * BLOCK_G + tl.arange(0, BLOCK_G))[:, None]
    return group, group * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_block(
    groups_ptr,  # to the first group
    block,
    groups,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,  # the block may have groups behind the last one
    POLICY: tl.constexpr,
):
    group, number = numbers_of(block, BLOCK_G, VEC)
    if MASKED:
        mask = tl.broadcast_to(group < groups, (BLOCK_G, VEC))
        return tl.load(groups_ptr + number, mask=mask, other=0.0, eviction_policy=POLICY)
    return tl.load(groups_ptr + number, eviction_policy=POLICY)


@triton.jit
def store_block(groups_ptr, g, block, groups, BLOCK_G: tl.constexpr, VEC: tl.constexpr, MASKED: tl.constexpr):
    group, number = numbers_of(block, BLOCK_G, VEC)
    g = g.to(groups_ptr.dtype.element_ty)
    if MASKED:
        mask = tl.broadcast_to(group < groups, (BLOCK_G, VEC))
        tl.store(groups_ptr + number, g, mask=mask, eviction_policy="evict_first")
    else:
        tl.store(groups_ptr + number, g, eviction_policy="evict_first")


@triton.jit
def edges_of(head, groups, V, VEC: tl.constexpr):
    """Columns of the head and of the tail, (2 VEC,), and which of them are there."""
    number = tl.arange(0, 2 * VEC)
    behind = head + groups * VEC + number - VEC
    return tl.where(number < VEC, number, behind), tl.where(number < VEC, number < head, behind < V)


@triton.jit
def class_weights(pointer, col, mask):
    return tl.load(pointer + col, mask=mask, other=0.0)


@triton.jit
def add_block(
    m,  # (BLOCK_G,), as the next three: the groups' maxima
    s,  # their sums of 2^(z - m)
    logit_sum,  # their sums of w z, with LOGIT_SUM
    column,  # and where the maxima stand, with ARGMAX
    u,  # (BLOCK_G, VEC)
    block,
    head,
    groups,
    V,
    class_weight_ptr,
    logit_options,
    logit_scale,
    softcap,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    group, number = numbers_of(block, BLOCK_G, VEC)
    z, _ = base2_logits(u.to(tl.float32), None, logit_options, logit_scale, softcap)
    if LOGIT_SUM:
        weighted = z
        if class_weight_ptr is not None:
            weighted *= class_weights(class_weight_ptr, head + number, tl.broadcast_to(group < groups, (BLOCK_G, VEC)))
        elif MASKED:
            weighted = tl.where(group < groups, z, 0.0)
        logit_sum += tl.sum(weighted, 1)
    if MASKED:
        z = tl.where(group < groups, z, float("-inf"))
    block_max = tl.max(z, 1)
    if ARGMAX:
        block_column = tl.min(tl.where(z == block_max[:, None], head + number, V), 1)
        column = tl.where(block_max > m, block_column, column)
    new_m = tl.maximum(m, block_max)
    s = s * tl.exp2(m - new_m) + tl.sum(tl.exp2(z - new_m[:, None]), 1)
    return new_m, s, logit_sum, column


@triton.jit
def whole_row(
    m,
    s,
    logit_sum,
    column,
    u,  # (2 VEC,), the edges'
    col,
    there,
    V,
    class_weight_ptr,
    logit_options,
    logit_scale,
    softcap,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Of the row: m, s, the logit sum in base 2, the argmax (the first of equals; V - 1 where nan is the maximum)."""
    z, _ = base2_logits(u.to(tl.float32), None, logit_options, logit_scale, softcap)
    row_logit_sum = 0.0
    if LOGIT_SUM:
        weighted = tl.where(there, z, 0.0)
        if class_weight_ptr is not None:
            weighted *= class_weights(class_weight_ptr, col, there)
        row_logit_sum = tl.sum(logit_sum, 0) + tl.sum(weighted, 0)
    z = tl.where(there, z, float("-inf"))
    row_max = tl.maximum(tl.max(m, 0), tl.max(z, 0))
    row_sum = tl.sum(s * tl.exp2(m - row_max), 0) + tl.sum(tl.exp2(z - row_max), 0)
    argmax = V - 1
    if ARGMAX:
        argmax = tl.minimum(argmax, tl.min(tl.where(m == row_max, column, V), 0))
        argmax = tl.minimum(argmax, tl.min(tl.where(z == row_max, col, V), 0))
    return row_max, row_sum, row_logit_sum, argmax


@triton.jit
def gradient_numbers(
    u, col, mask, reference, factor, sum_factor, at_target, class_weight_ptr, logit_options, logit_scale, softcap
):
    """(factor 2^(z - reference) + sum_factor w + at_target) dz/du of numbers u of a row; factors times logit_scale."""
    z, dz_du = base2_logits(u.to(tl.float32), None, logit_options, logit_scale, softcap)
    g = tl.exp2(z - reference) * factor
    if sum_factor is not None:
        if class_weight_ptr is None:
            g += sum_factor
        else:
            g += sum_factor * class_weights(class_weight_ptr, col, mask)
    if at_target is not None:
        g += at_target
    if logit_options.softcap is not None:
        g *= dz_du
    return g
