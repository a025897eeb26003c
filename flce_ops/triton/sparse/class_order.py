"""Turns lists by token into lists by class: a counting sort on the device, with the same result in every run.

    table    (B, V)    how many entries of each class each block of tokens has
                       then in how many places of the class's list the entries of earlier blocks stand
    behind   (V,)      where each class's list ends
    the block's next entry of class v goes to   behind_{v-1} + table_bv,   which grows by 1

A program for each block of tokens hands out the places, one token after another. So the entries of a class are in the
order of the tokens. A token has a class once, so the order of its own entries does not matter. Only the device knows
how many entries there are, so torch.sort would have to sort the whole buffer, its unused part included.
"""

import torch
import triton.language as tl
from torch import Tensor

from ...support.integers import cdiv
from ..kernel import Kernel
from .gather_sums import Lists, bounds, cut_lists

# N tokens, V vocabulary, B blocks of tokens

BLOCK_B, BLOCK_V = 32, 64
LISTED = 256  # entries that a program reads at a time


@Kernel
def clear_kernel(out_ptr, numbers, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.zeros((BLOCK,), tl.int32), mask=i < numbers)


@Kernel
def count_kernel(
    lists,  # Lists, by token
    table_ptr,  # (B, V) int32, added to
    V,
    rows,  # tokens of a block
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(lists, row)
    for start in range(begin + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        column = tl.load(lists.entries + place, mask=place < end, other=0) & 0xFFFFFFFF
        tl.atomic_add(table_ptr + row // rows * V + column, 1, mask=place < end, sem="relaxed")


@Kernel
def running_totals_kernel(
    table_ptr,  # (B, V) int32, the counts; out: their sums over earlier blocks
    total_ptr,  # (V,) int32, out
    B,
    V,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_V,), tl.int32)
    for start in range(0, B, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        places = table_ptr + block.to(tl.int64)[:, None] * V + v[None, :]
        mask = (block < B)[:, None] & (v < V)[None, :]
        count = tl.load(places, mask=mask, other=0)
        tl.store(places, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(total_ptr + v, total, mask=v < V)


@Kernel
def place_kernel(
    lists,  # Lists, by token
    order_ptr,  # (N,), the token of each of them; None if they are in the order of the tokens
    table_ptr,  # (B, V) int32, where in its class's list the block's next entry belongs
    classes,  # Lists by class; writes the entries
    N,
    V,
    rows,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    for row in range(block * rows, tl.minimum((block + 1) * rows, N)):
        begin, end = bounds(lists, row)
        token = row
        if order_ptr is not None:
            token = tl.load(order_ptr + row).to(tl.int64)
        for start in range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            here = place < end
            entries = tl.load(lists.entries + place, mask=here, other=0)
            column, value = entries & 0xFFFFFFFF, entries >> 32 << 32
            to = tl.load(classes.behind + column - 1, mask=here & (column > 0), other=0)
            to += tl.atomic_add(table_ptr + block * V + column, 1, mask=here, sem="relaxed")
            tl.store(classes.entries + to, value | token, mask=here)
        tl.debug_barrier()  # the next token's places are behind this one's


def launch_class_order(
    lists: Lists,  # by token
    num_classes: int,
    *,
    rows: int,  # tokens of a block
    splits: int,  # the most splits
    order: Tensor | None = None,  # (N,)
) -> Lists:
    tokens, like = lists.lengths.shape[0], lists.entries
    blocks = cdiv(tokens, rows)
    table = like.new_empty(blocks, num_classes, dtype=torch.int32)
    total, behind = (like.new_empty(num_classes, dtype=torch.int32) for _ in range(2))
    clear_kernel[(cdiv(table.numel(), 8192),)](table, table.numel(), BLOCK=8192, num_warps=8)
    count_kernel[(tokens, lists.walkers)](lists, table, num_classes, rows, BLOCK=LISTED, num_warps=4)
    running_totals_kernel[(cdiv(num_classes, BLOCK_V),)](
        table, total, blocks, num_classes, BLOCK_B=BLOCK_B, BLOCK_V=BLOCK_V, num_warps=4
    )
    classes = cut_lists(Lists(like.new_empty(like.numel(), dtype=torch.int64), total, behind=behind), splits)
    place_kernel[(blocks,)](lists, order, table, classes, tokens, num_classes, rows, BLOCK=LISTED, num_warps=4)
    return classes
