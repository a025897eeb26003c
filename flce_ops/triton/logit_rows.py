"""A row of given logits in groups of 16 bytes, wherever it starts: V may be odd, and rows then start anywhere.

    memory    ... |g g g g g g g g|g g g g g g g g| ...      groups of VEC numbers at multiples of 16 bytes
    row              ^ lead = 2   ...      last ^            its first and last group may hold the neighbours' numbers

A program reads whole groups, BLOCK_G at a time, one number of a thread beside the next: a group is a row of a tile
(BLOCK_G, VEC), so that what is summed along it stays in a thread. What is not the row's own counts as -inf. It writes
whole groups too; those it shares with other rows number by number.

    online logsumexp     m' = max(m, max_k z_k)     s' = s 2^(m - m') + sum_k 2^(z_k - m')      of each of BLOCK_G groups

in base 2 (z log2 e). The groups are reduced to the row's m and s once, behind its last block.
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
def row_start(matrix, i, VEC: tl.constexpr):
    """Pointer to the row's first group, and how many numbers of it are another row's."""
    first = i.to(tl.int64) * matrix.stride + matrix.shift
    group = first // VEC
    return tl.multiple_of(matrix.pointer - matrix.shift + group * VEC, 16), (first - group * VEC).to(tl.int32)


@triton.jit
def groups_of(block, BLOCK_G: tl.constexpr, VEC: tl.constexpr):
    """Of a block of a row: indices of its groups (BLOCK_G, 1), and of its numbers behind the first group (BLOCK_G, VEC).
    """
    group = (block * BLOCK_G + tl.arange(0, BLOCK_G))[:, None]
    return group, group * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_block(row, block, groups, BLOCK_G: tl.constexpr, VEC: tl.constexpr, POLICY: tl.constexpr):
    group, number = groups_of(block, BLOCK_G, VEC)
    mask = tl.broadcast_to(group < groups, (BLOCK_G, VEC))
    return tl.load(row + number, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def class_weights(pointer, col, inside):
    return tl.load(pointer + col, mask=inside, other=0.0)


@triton.jit
def add_block(
    m,  # (BLOCK_G,), as the next three: the groups' maxima
    s,  # their sums of 2^(z - m)
    logit_sum,  # their sums of w z, with LOGIT_SUM
    column,  # and where the maxima stand, with ARGMAX
    u,  # (BLOCK_G, VEC)
    block,
    lead,
    V,
    class_weight_ptr,
    logit_options,
    logit_scale,
    softcap,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
):
    _, number = groups_of(block, BLOCK_G, VEC)
    col = number - lead
    inside = (col >= 0) & (col < V)
    z, _ = base2_logits(u.to(tl.float32), None, logit_options, logit_scale, softcap)
    if LOGIT_SUM:
        weighted = tl.where(inside, z, 0.0)
        if class_weight_ptr is not None:
            weighted *= class_weights(class_weight_ptr, col, inside)
        logit_sum += tl.sum(weighted, 1)
    z = tl.where(inside, z, float("-inf"))
    block_max = tl.max(z, 1)
    if ARGMAX:
        block_column = tl.min(tl.where(z == block_max[:, None], col, V), 1)
        column = tl.where(block_max > m, block_column, column)
    new_m = tl.maximum(m, block_max)
    s = s * tl.exp2(m - new_m) + tl.sum(tl.exp2(z - new_m[:, None]), 1)
    return new_m, s, logit_sum, column


@triton.jit
def gradient_numbers(u, col, inside, factors, at_target, class_weight_ptr, logit_options, logit_scale, softcap):
    """(factor 2^(z - reference) + sum_factor w + at_target) dz/du of numbers u of a row; all factors times logit_scale.
    """
    reference, factor, sum_factor = factors
    z, dz_du = base2_logits(u.to(tl.float32), None, logit_options, logit_scale, softcap)
    g = tl.exp2(z - reference) * factor
    if sum_factor is not None:
        if class_weight_ptr is None:
            g += sum_factor
        else:
            g += sum_factor * class_weights(class_weight_ptr, col, inside)
    if at_target is not None:
        g += at_target
    if logit_options.softcap is not None:
        g *= dz_du
    return g


@triton.jit
def store_block(
    out_row,  # pointer to the row's first group, or, ELEMENTWISE, to its first number
    g,  # (BLOCK_G, VEC)
    block,
    lead,
    V,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    ELEMENTWISE: tl.constexpr,  # rows of `out` lie otherwise in groups than those of the logits
):
    """The groups that are all the row's own."""
    group, number = groups_of(block, BLOCK_G, VEC)
    g = g.to(out_row.dtype.element_ty)
    if ELEMENTWISE:
        col = number - lead
        tl.store(out_row + col, g, mask=(col >= 0) & (col < V))
    else:
        own = (group * VEC >= lead) & (group * VEC + VEC <= lead + V)
        tl.store(out_row + number, g, mask=tl.broadcast_to(own, (BLOCK_G, VEC)), eviction_policy="evict_first")
