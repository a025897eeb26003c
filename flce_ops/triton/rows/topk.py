"""Helpers for kernels with K classes per token: the summed weight of equal classes, and the largest entry.

A row's targets are processed topk_at_a_time. Equal classes of a token name one entry of its row. Each of them computes
the whole entry, in the same order, and all write the same number. So no atomics are needed, and every run has the same
bits.
"""

import triton
import triton.language as tl

from ...support.sizes import next_power_of_2

# K targets of a row


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
