"""Turns lists by token into lists by class: a counting sort on the device, with the same result in every run.

    bits      (V, N / 32)    a bit for each token that keeps an entry of the class: OR, in any order
    prefix    (V, N / 256)   for each group of 256 tokens: entries of the class among the tokens before the group
    behind    (V,)           where each class's list ends
    the entry of token i goes to   behind_{v-1} + prefix + the number of bits below i in its group

A token has at most one entry of a class, so one bit suffices. Within a class, entries are in the order of the tokens.
H200, 8192 tokens of 352 entries, V = 128256: 0.3 ms. Only the device knows how many entries there are, so torch.sort
would have to sort the whole buffer, its unused part included.
"""

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.tma import Matrix, load_tile
from ..launch.replay import Kernel
from ..rows.valid_tokens import ValidTokens
from .gather_sums import SplitLists, launch_split_lists
from .sparse_lists import Lists

# n tokens, V vocabulary, R the most entries of a token's list, G groups of tokens, W words of bits

WORD = tl.constexpr(32)
WORDS_OF_GROUP = tl.constexpr(8)
GROUP = tl.constexpr(256)  # tokens
BLOCK_G, BLOCK_V = 16, 16


class Order(NamedTuple):
    """Passed to kernels as one argument."""

    bits: Tensor  # (V, W) int32
    prefix: Tensor  # (V, G) int32


@Kernel
def clear_kernel(out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.zeros((BLOCK,), tl.int32), mask=i < count)


@triton.jit
def popcount(x):
    """The number of bits set in a uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@Kernel
def mark_kernel(
    lists,  # Lists
    order,  # Order; writes the bits, which are 0 before
    R,
    G,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(lists.lengths + row)
    bit = tl.full((BLOCK,), 1, tl.int32) << (row % WORD)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        entries = tl.load(lists.entries + row.to(tl.int64) * R + at, mask=at < count, other=0)
        place = (entries & 0xFFFFFFFF) * G * WORDS_OF_GROUP + row // WORD
        tl.atomic_or(order.bits + place, bit, mask=at < count, sem="relaxed")


@Kernel
def count_kernel(
    order,  # Order; writes the prefix
    total_ptr,  # (V,) int32, out
    V,
    G,
    BLOCK_G: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    W = G * WORDS_OF_GROUP
    v = (tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    total = tl.zeros((BLOCK_V,), tl.int32)
    for start in range(0, G, BLOCK_G):
        word = start * WORDS_OF_GROUP + tl.arange(0, BLOCK_G * WORDS_OF_GROUP)
        bits = load_tile(Matrix(order.bits, W), v, word, v < V, word < W).to(tl.uint32, bitcast=True)
        count = tl.sum(tl.reshape(popcount(bits), (BLOCK_V, BLOCK_G, WORDS_OF_GROUP)), 2)
        group = start + tl.arange(0, BLOCK_G)
        before = total[:, None] + tl.cumsum(count, 1) - count
        places = order.prefix + v[:, None] * G + group[None, :]
        tl.store(places, before, mask=(v < V)[:, None] & (group < G)[None, :])
        total += tl.sum(count, 1)
    tl.store(total_ptr + v, total, mask=v < V)


@Kernel
def scatter_kernel(
    lists,  # Lists
    order,  # Order
    classes,  # SplitLists; writes the entries
    valid_tokens,  # ValidTokens
    R,
    G,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    count = tl.load(lists.lengths + row)
    group = row // GROUP
    word = group * WORDS_OF_GROUP + tl.arange(0, WORDS_OF_GROUP)
    own = row // WORD
    lower = ((tl.full((), 1, tl.int64) << (row % WORD)) - 1).to(tl.uint32)
    earlier = tl.where(word < own, tl.full((), 0xFFFFFFFF, tl.uint32), tl.where(word == own, lower, 0))
    token = tl.load(valid_tokens.order + row).to(tl.int64)
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        entries = tl.load(lists.entries + row.to(tl.int64) * R + at, mask=mask, other=0)
        v = entries & 0xFFFFFFFF
        bits = load_tile(Matrix(order.bits, G * WORDS_OF_GROUP), v, word, mask, word <= own).to(tl.uint32, bitcast=True)
        place = tl.sum(popcount(bits & earlier[None, :]), 1)
        place += tl.load(order.prefix + v * G + group, mask=mask, other=0)
        place += tl.load(classes.behind + v - 1, mask=mask & (v > 0), other=0)
        tl.store(classes.entries + place, (entries >> 32 << 32) | token, mask=mask)


def order_bytes(num_classes: int, room: int) -> tuple[int, int]:
    """The bytes for each token, if the number of tokens is a multiple of GROUP, and the bytes beside these."""
    return 8 * room + num_classes * 4 * (WORDS_OF_GROUP.value + 1) // GROUP.value, 16 * num_classes


def launch_class_order(
    lists: Lists,
    num_classes: int,
    valid_tokens: ValidTokens,
    *,
    shortest: int,  # the shortest split
    splits: int,  # the most splits
    hidden: int,
) -> tuple[SplitLists, Tensor]:  # (P, D) float32
    """Returns the lists by class, and memory for the sums of their splits, which reuses that of the bits."""
    n, room = lists.entries.shape
    groups = triton.cdiv(n, GROUP.value)
    words = groups * WORDS_OF_GROUP.value
    count = lists.lengths
    sizes = [2 * n * room, max(num_classes * words, splits * hidden), num_classes * groups]
    ends = list(itertools.accumulate(triton.cdiv(size, 4) * 4 for size in sizes))
    memory = count.new_empty(ends[2])
    entries, shared = memory[: sizes[0]].view(torch.int64), memory[ends[0] : ends[1]]
    bits = shared[: num_classes * words].view(num_classes, words)
    sums = shared[: splits * hidden].view(torch.float32).view(splits, hidden)
    prefix = memory[ends[1] : ends[1] + sizes[2]].view(num_classes, groups)
    total, behind, cut = count.new_empty(3, num_classes).unbind()
    classes = SplitLists(entries, total, behind, count.new_empty(()), cut)
    clear_kernel[(triton.cdiv(bits.numel(), 8192),)](bits, bits.numel(), BLOCK=8192, num_warps=8)
    order = Order(bits, prefix)
    mark_kernel[(n, lists.walkers)](lists, order, room, groups, BLOCK=256, num_warps=4)
    count_kernel[(triton.cdiv(num_classes, BLOCK_V),)](
        order, total, num_classes, groups, BLOCK_G=BLOCK_G, BLOCK_V=BLOCK_V, num_warps=4
    )
    launch_split_lists(classes, shortest, splits)
    scatter_kernel[(n, lists.walkers)](lists, order, classes, valid_tokens, room, groups, BLOCK=128, num_warps=4)
    return classes, sums
