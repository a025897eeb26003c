"""What the kernels of K classes a token share: the weights of equal classes, and the slot of the largest entry.

A row's slots are taken some at a time (slots_at_a_time). Equal classes of a token name one entry of its row, so each of
them makes the whole of it, in the order of the slots, and all write the same number: no atomics, the same bits in every
run.
"""

import triton
import triton.language as tl

# K slots of a row


def slots_at_a_time(slots: int) -> int:
    """Each is compared with as many at a time: 64 x 64 comparisons of K = 64."""
    return min(64, triton.next_power_of_2(slots))


@triton.jit
def sum_of_equals(
    column,  # (BLOCK_S,)
    column_ptr,  # (K,) of the row
    value_ptr,  # (K,)
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """For each of `column` the sum of the values of the row's slots of that class."""
    total = tl.zeros((BLOCK_S,), tl.float32)
    for start in range(0, SLOTS, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        inside = slot < SLOTS
        others = tl.load(column_ptr + slot, mask=inside, other=-1)
        values = tl.load(value_ptr + slot, mask=inside, other=0.0)
        total += tl.sum(tl.where(column[:, None] == others[None, :], values[None, :], 0.0), 1)
    return total


@triton.jit
def larger_entry(
    size,  # () of the largest so far, as the next two
    entry,
    column,
    entries,  # (BLOCK_S,)
    columns,  # (BLOCK_S,), -1 where there is none
    BLOCK_S: tl.constexpr,
):
    """The largest of both by magnitude, with its column; the first of equals. An entry of nan is none."""
    sizes = tl.where((columns >= 0) & (entries == entries), tl.abs(entries), -1.0)
    largest = tl.max(sizes, 0)
    place = tl.arange(0, BLOCK_S)
    at_largest = place == tl.min(tl.where(sizes == largest, place, BLOCK_S), 0)
    larger = largest > size
    entry = tl.where(larger, tl.sum(tl.where(at_largest, entries, 0.0), 0), entry)
    column = tl.where(larger, tl.sum(tl.where(at_largest, columns, 0), 0), column)
    return tl.where(larger, largest, size), entry, column
