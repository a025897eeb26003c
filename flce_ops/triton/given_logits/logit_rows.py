"""A row of given logits, wherever it starts: V may be odd, and then rows start between multiples of 16 bytes.

    row    |h h|g g g g g g g g|g g g g g g g g| ... |t t t|       groups of VEC numbers, 16 bytes, at multiples of 16
            head                                      tail         up to VEC - 1 numbers on either side, the edges

A program takes BLOCK_G groups at a time as a tile (BLOCK_G, VEC). A group is one load of a thread, so what is reduced
along it stays in that thread. What a thread holds are words of 32 bits, of half numbers two in each:

    online logsumexp of each of BLOCK_G groups:    m' = max(m, max_k z_k)     s' = s 2^(m - m') + sum_k 2^(z_k - m')

in base 2 (z log2 e). The groups and the edges come together once, behind the last block.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..gemm.logits_gemm import base2_logits

# N tokens, V vocabulary

# below any logit, and finite: -inf - -inf would be nan
LOWEST = tl.constexpr(-3.0e38)
GROUP_WORDS = tl.constexpr(4)  # 16 bytes, one load or store of a thread
PREFETCH = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.u32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


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
def target_of(target_ptr, i, ignore_index, V):
    """Whether row i counts, and its target; 0 for one out of range, which is refused elsewhere."""
    target = tl.load(target_ptr + i).to(tl.int64)
    inside = (target >= 0) & (target < V)
    return target != ignore_index, tl.where(inside, target, 0).to(tl.int32)


@triton.jit
def ask_for(groups_ptr, groups, BLOCK_G: tl.constexpr):
    """A row's first groups, 8 BLOCK_G at most, to the L2 cache: lines of 128 bytes."""
    if not INTERPRETED:
        line = tl.arange(0, BLOCK_G)
        line_ptr = groups_ptr.to(tl.pointer_type(tl.int32)) + line * (8 * GROUP_WORDS)
        wanted = (line * 8 < groups).to(tl.int32)
        tl.inline_asm_elementwise(PREFETCH, "=r,l,r", [line_ptr, wanted], dtype=tl.int32, is_pure=False, pack=1)


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
    valid,
    BLOCK_G: tl.constexpr,
    MASKED: tl.constexpr,  # the block may have groups behind the last one
    POLICY: tl.constexpr,
):
    """Its words, (BLOCK_G, GROUP_WORDS): float32 of such logits, else int32; 0 of a row that does not count."""
    if groups_ptr.dtype.element_ty.primitive_bitwidth == 16:
        groups_ptr = groups_ptr.to(tl.pointer_type(tl.int32))
    group, word = numbers_of(0, BLOCK_G, GROUP_WORDS)
    mask = valid
    if MASKED:
        mask = tl.broadcast_to(valid & (group < groups - block * BLOCK_G), (BLOCK_G, GROUP_WORDS))
    return tl.load(groups_ptr + block * (BLOCK_G * GROUP_WORDS) + word, mask=mask, other=0, eviction_policy=POLICY)


@triton.jit
def numbers_in(words, DTYPE: tl.constexpr):
    """(BLOCK_G, GROUP_WORDS) -> (BLOCK_G, VEC) in float32."""
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
    """The same words, of which the compiler knows nothing: it would keep what it unpacked, in twice the registers."""
    if INTERPRETED or words.dtype == tl.float32:
        return words
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=False, pack=1)


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
    logit_numbers,
    logit_scale,
    softcap,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
):
    group, number = numbers_of(block, BLOCK_G, VEC)
    z, _ = base2_logits(u.to(tl.float32), None, logit_numbers, logit_scale, softcap)
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
    logit_numbers,
    logit_scale,
    softcap,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Of the row: m, s, the logit sum in base 2, the argmax (the first of equals; V - 1 where nan is the maximum)."""
    z, _ = base2_logits(u.to(tl.float32), None, logit_numbers, logit_scale, softcap)
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
