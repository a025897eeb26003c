"""Reads a row of given logits, and writes its gradient, at any alignment: if V is odd, rows do not start at multiples
of 16 bytes.

    row    |h h|g g g g g g g g|g g g g g g g g| ... |t t t|       groups of VEC numbers, 16 bytes, at multiples of 16
            head                                      tail         up to VEC - 1 numbers on either side, the edges

A program reads BLOCK_G groups at a time, as a tile (BLOCK_G, VEC). A group is one load of one thread, so reductions
along a group stay in the thread. A thread holds 32-bit words, which contain two 16-bit numbers each:

    online logsumexp of each of BLOCK_G groups:    m' = max(m, max_k z_k)     s' = s e^(m - m') + sum_k e^(z_k - m')

The sum of logits is computed relative to the maximum, too: V lse - sum_j z_j would lose digits to cancellation if the
logits share a large offset. A logit is multiplied by log2 e after the maximum is subtracted from it. The product of a
float32 logit of 3000 and log2 e has an error of up to 1.2e-4; the difference of two logits has none of that size. The
sums of the groups and of the edges are combined once, after the last block.

    G_ij = (factor_i e^(z_ij - reference_i) + sum_factor_i w_j + [j = y_i] at_target_i) dz/du

The gradient may overwrite the logits: everything that the target and the edges need is read before anything is written.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...objectives.in_triton import LN2
from ..gemm.epilogues import logit_gradient
from ..kernel import everywhere
from ..rows.logit_numbers import LOG2E, base2_logits

# N tokens, V vocabulary

# below any logit, and finite: -inf minus -inf would be nan
LOWEST = tl.constexpr(-3.0e38)
GROUP_WORDS = tl.constexpr(4)  # 16 bytes, one load or store of a thread
PREFETCH = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.u32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Matrix(NamedTuple):
    """An (N, V) matrix with rows of unit stride."""

    pointer: Tensor
    stride: int  # distance between rows, in numbers
    shift: int  # distance of `pointer` from the multiple of 16 bytes before it, in numbers


def matrix_of(tensor: Tensor) -> Matrix:
    return Matrix(tensor, tensor.stride(0), tensor.data_ptr() % 16 // tensor.element_size())


class Row(NamedTuple):
    """A row of a matrix, computed in a kernel."""

    pointer: Tensor
    head: int  # numbers in front of the groups
    groups: int
    V: int


class Scores(NamedTuple):
    """What a row's z and its weighted sum follow from, apart from u. Computed in a kernel."""

    options: LogitOptions  # pointers; None for an option that is not used
    numbers: LogitOptions  # loaded
    class_weight: Tensor | None  # (V,) float32


@triton.jit
def row_of(matrix, i, V, VEC: tl.constexpr):
    """Row i."""
    first = i.to(tl.int64) * matrix.stride
    lead = ((first + matrix.shift) % VEC).to(tl.int32)
    head = tl.minimum((VEC - lead) % VEC, V)
    return Row(matrix.pointer + first, head, (V - head) // VEC, V)


@triton.jit
def target_of(target_ptr, i, ignore_index, V):
    """Returns whether row i is valid, and its target; 0 for a target out of range, which is refused elsewhere."""
    target = tl.load(target_ptr + i).to(tl.int64)
    inside = (target >= 0) & (target < V)
    return target != ignore_index, tl.where(inside, target, 0).to(tl.int32)


@triton.jit
def ask_for(row, groups, BLOCK_G: tl.constexpr):
    """Prefetches the row's first groups, 8 BLOCK_G at most, into the L2 cache, in lines of 128 bytes."""
    if not INTERPRETED:
        line = tl.arange(0, BLOCK_G)
        line_ptr = (row.pointer + row.head).to(tl.pointer_type(tl.int32)) + line * (8 * GROUP_WORDS)
        wanted = (line * 8 < groups).to(tl.int32)
        tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [line_ptr, wanted], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def numbers_of(block, BLOCK_G: tl.constexpr, VEC: tl.constexpr):
    """Indices of a block's groups, (BLOCK_G, 1), and of its numbers, (BLOCK_G, VEC), counted from the row's first
    group.
    """
    group = (block * BLOCK_G + tl.arange(0, BLOCK_G))[:, None]
    return group, group * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_block(
    groups_ptr,  # to the first group
    block,
    groups,
    valid,
    BLOCK_G: tl.constexpr,
    MASKED: tl.constexpr,  # the block may extend past the last group
    POLICY: tl.constexpr,
):
    """The words of a block, (BLOCK_G, GROUP_WORDS): float32 for float32 logits, else int32; 0 for a row that is not
    valid.
    """
    if groups_ptr.dtype.element_ty.primitive_bitwidth == 16:
        groups_ptr = groups_ptr.to(tl.pointer_type(tl.int32))
    group, word = numbers_of(0, BLOCK_G, GROUP_WORDS)
    mask = everywhere(valid, word)
    if MASKED:
        mask = mask & (group < groups - block * BLOCK_G)
    return tl.load(groups_ptr + block * (BLOCK_G * GROUP_WORDS) + word, mask=mask, other=0, eviction_policy=POLICY)


@triton.jit
def numbers_in(words, DTYPE: tl.constexpr):
    """Unpacks words: (BLOCK_G, GROUP_WORDS) -> (BLOCK_G, VEC) in float32."""
    if DTYPE == tl.float32:
        return words
    else:
        if DTYPE == tl.bfloat16:
            first = (words << 16).to(tl.float32, bitcast=True)
            second = (words & -65536).to(tl.float32, bitcast=True)
        else:
            first = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
            second = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return tl.join(first, second).reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def as_loaded(words):
    """Returns the same words through inline assembly, so that the compiler unpacks them again. Otherwise it would keep
    the numbers that it unpacked before, in twice the registers.
    """
    if INTERPRETED or words.dtype == tl.float32:
        return words
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def edges_of(row, VEC: tl.constexpr):
    """Columns of the head and of the tail, (2 VEC,), and which of them are there."""
    number = tl.arange(0, 2 * VEC)
    behind = row.head + row.groups * VEC + number - VEC
    return tl.where(number < VEC, number, behind), tl.where(number < VEC, number < row.head, behind < row.V)


@triton.jit
def logits_of(u, scores):
    """(z, dz/du / logit_scale) of given numbers."""
    return base2_logits(u.to(tl.float32), None, scores.options, scores.numbers, 1.0)


@triton.jit
def exp_below(difference):
    """exp(difference), where difference is at most about 0."""
    return tl.exp2(difference * LOG2E)


@triton.jit
def class_weights(scores, col, mask):
    return tl.load(scores.class_weight + col, mask=mask, other=0.0)


@triton.jit
def nothing_added(BLOCK_G: tl.constexpr):
    """Five numbers of each group, (BLOCK_G,): the maximum m; the sum of e^(z - m); with LOGIT_SUM those of w (z - m)
    and of w; with ARGMAX the column of the maximum.
    """
    zeros = tl.zeros((BLOCK_G,), tl.float32)
    return tl.full((BLOCK_G,), LOWEST, tl.float32), zeros, zeros, zeros, tl.zeros((BLOCK_G,), tl.int32)


@triton.jit
def add_block(
    sums,  # of nothing_added
    u,  # (BLOCK_G, VEC)
    block,
    row,  # Row
    scores,  # Scores
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    m, s, logit_sum, weight_sum, column = sums
    group, number = numbers_of(block, BLOCK_G, VEC)
    inside = group < row.groups
    z, _ = logits_of(u, scores)
    if MASKED:
        z = tl.where(inside, z, float("-inf"))
    block_max = tl.max(z, 1)
    if ARGMAX:
        block_column = tl.min(tl.where(z == block_max[:, None], row.head + number, row.V), 1)
        column = tl.where(block_max > m, block_column, column)
    new_m = tl.maximum(m, block_max)
    shifted = z - new_m[:, None]
    if LOGIT_SUM:
        weighted, numbers = shifted, VEC * tl.sum(inside.to(tl.float32), 1)
        if scores.class_weight is not None:
            weight = class_weights(scores, row.head + number, tl.broadcast_to(inside, (BLOCK_G, VEC)))
            # two signs: Triton 3.6 cannot compile a loop that adds a plain reduction to a sum which it also reads
            weighted, numbers = weight * shifted, -tl.sum(-weight, 1)
        if MASKED:
            weighted = tl.where(inside, weighted, 0.0)
        logit_sum += moved_sum(weight_sum, m - new_m) + tl.sum(weighted, 1)
        weight_sum += numbers
    s = s * exp_below(m - new_m) + tl.sum(exp_below(shifted), 1)
    return new_m, s, logit_sum, weight_sum, column


@triton.jit
def moved_sum(weight_sum, distance):
    """What w (z - m) sums to more if m decreases by `distance`. A group without a number has the lowest m."""
    return tl.where(weight_sum == 0.0, 0.0, weight_sum * distance)


@triton.jit
def whole_row(
    sums,  # of all blocks
    u,  # (2 VEC,), logits of the edges
    col,
    there,
    V,
    scores,  # Scores
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Returns the row's m, s, log2 s, sum_j w_j (z_j - lse), and argmax. The argmax is the first of equal maxima, and
    some class if a logit is nan.
    """
    m, s, logit_sum, weight_sum, column = sums
    z, _ = logits_of(u, scores)
    z = tl.where(there, z, float("-inf"))
    row_max = tl.maximum(tl.max(m, 0), tl.max(z, 0))
    row_sum = tl.sum(s * exp_below(m - row_max), 0) + tl.sum(exp_below(z - row_max), 0)
    log2_sum = tl.log2(row_sum)
    row_logit_sum = 0.0
    if LOGIT_SUM:
        weight = there.to(tl.float32)
        if scores.class_weight is not None:
            weight = class_weights(scores, col, there)
        of_edges = tl.sum(tl.where(there, weight * (z - row_max), 0.0), 0)
        from_maximum = tl.sum(logit_sum + moved_sum(weight_sum, m - row_max), 0) + of_edges
        row_logit_sum = from_maximum - (tl.sum(weight_sum, 0) + tl.sum(weight, 0)) * (log2_sum * LN2)
    argmax = V - 1
    if ARGMAX:
        argmax = tl.minimum(argmax, tl.min(tl.where(m == row_max, column, V), 0))
        argmax = tl.minimum(argmax, tl.min(tl.where(z == row_max, col, V), 0))
    return row_max, row_sum, log2_sum, row_logit_sum, argmax


class Slopes(NamedTuple):
    """The numbers of a row's gradient, computed in a kernel. The factors include logit_scale."""

    reference: float
    factor: float
    sum_factor: float | None
    at_target: float


@triton.jit
def out_of(grad_logits, i, row, ALIKE: tl.constexpr):
    """Pointers to the gradient's row and to its first group."""
    out_row = grad_logits.pointer + i.to(tl.int64) * grad_logits.stride
    groups = out_row + row.head
    if ALIKE:
        groups = tl.multiple_of(groups, 16)
    return out_row, groups


@triton.jit
def gradient_numbers(u, col, mask, slopes, scores, AT_TARGET: tl.constexpr):
    """(factor e^(z - reference) + sum_factor w + at_target) dz/du of numbers u of a row."""
    z, dz_du = logits_of(u, scores)
    weight = 1.0
    if slopes.sum_factor is not None and scores.class_weight is not None:
        weight = class_weights(scores, col, mask)
    g = logit_gradient((z - slopes.reference) * LOG2E, slopes.factor, None, slopes.sum_factor, weight)
    if AT_TARGET:
        g += slopes.at_target
    if scores.options.softcap is not None:
        g *= dz_du
    return g


@triton.jit
def store_gradient(
    out_groups_ptr,
    words,  # the block's words
    block,
    row,  # Row
    slopes,  # Slopes
    scores,  # Scores
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    dtype: tl.constexpr = out_groups_ptr.dtype.element_ty
    group, number = numbers_of(block, BLOCK_G, VEC)
    inside = tl.broadcast_to(group < row.groups, (BLOCK_G, VEC))
    g = gradient_numbers(numbers_in(words, dtype), row.head + number, inside, slopes, scores, False)
    _, place = numbers_of(0, BLOCK_G, VEC)
    mask = None
    if MASKED:
        mask = inside
    tl.store(out_groups_ptr + block * (BLOCK_G * VEC) + place, g.to(dtype), mask=mask, eviction_policy="evict_first")


@triton.jit
def finish_gradient(
    out_row,
    u_edges,  # (2 VEC,), read before anything was written; so was u_target
    edge,
    there,
    u_target,
    column,
    V,
    slopes,  # Slopes
    scores,  # Scores
):
    """Writes the gradient's edges and the target's entry."""
    g = gradient_numbers(u_edges, edge, there, slopes, scores, False)
    tl.store(out_row + edge, g.to(out_row.dtype.element_ty), mask=there)
    g = gradient_numbers(u_target, column, column < V, slopes, scores, True)
    tl.debug_barrier()  # waits: another thread has written this place with its block
    tl.store(out_row + column, g.to(out_row.dtype.element_ty))
