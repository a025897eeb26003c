"""Lists of very different lengths become pieces, so that no program walks a long one alone.

    piece    = max(2 / P of all entries, the shortest)          so there are P pieces at most
    pieces_i = ceil(length_i / piece) where length_i > piece, else 0; in the table with those of the lists before

A few classes have most of the entries of grad_linear_weight, and a few tokens twenty times those of the others: at
2^-12 a trained model's keep 200 in the mean, some 4,000. A program adds up eight at a time, each time waiting for
memory, and would outlast all others: 1.9 ms for grad_input where 3 tokens in 100 keep 2,000 to 3,000
(8192x1024x50304), 0.8 in pieces of 512.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.replay import Kernel

# L lists, P pieces at most


class CutLists(NamedTuple):
    """Those longer than a piece are cut; a number of pieces is that of this list and of those before it."""

    entries: Tensor  # int64: a float32 value above the index of a row
    lengths: Tensor  # (L,) int32
    behind: Tensor | None  # (L,) int32, where they end, one after the other; None: list i begins at i times `room`
    piece: Tensor  # () int32
    pieces: Tensor  # (L,) int32


@triton.jit
def bounds(lists, i, room):
    """Of list i in the entries, int64."""
    length = tl.load(lists.lengths + i).to(tl.int64)
    if lists.behind is None:
        begin = i.to(tl.int64) * room
    else:
        begin = tl.load(lists.behind + i).to(tl.int64) - length
    return begin, begin + length


@triton.jit
def list_of_piece(pieces_ptr, piece, L, steps):
    """The first list behind which there are more pieces, and its first piece."""
    low, high = 0, L
    for _ in range(steps):
        middle = (low + high) // 2
        past = tl.load(pieces_ptr + middle) > piece
        high = tl.where(past, middle, high)
        low = tl.where(past, low, tl.minimum(middle + 1, L - 1))
    return low, tl.load(pieces_ptr + low - 1, mask=low > 0, other=0)


@Kernel
@triton.jit
def cut_lists_kernel(
    lists,  # CutLists; `behind`, `piece` and `pieces` are out
    L,
    P,
    shortest,
    BLOCK: tl.constexpr,
):
    """One program. sum ceil(length / piece) over lengths > piece is at most 2 / piece of all entries."""
    entries = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        entries += tl.load(lists.lengths + i, mask=i < L, other=0)
    piece = tl.maximum(tl.cdiv(2 * tl.sum(entries.to(tl.int64), 0), P), shortest).to(tl.int32)
    tl.store(lists.piece, piece)
    behind = tl.zeros((), tl.int32)
    pieces = tl.zeros((), tl.int32)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        length = tl.load(lists.lengths + i, mask=i < L, other=0)
        cut = tl.where(length > piece, tl.cdiv(length, piece), 0)
        tl.store(lists.pieces + i, pieces + tl.cumsum(cut, 0), mask=i < L)
        pieces += tl.sum(cut, 0)
        if lists.behind is not None:
            tl.store(lists.behind + i, behind + tl.cumsum(length, 0), mask=i < L)
            behind += tl.sum(length, 0)


def launch_cut_lists(
    lists: CutLists,  # out: `behind`, `piece` and `pieces`
    shortest: int,  # piece
    pieces: int,  # at most
) -> None:
    count = lists.lengths.shape[0]
    cut_lists_kernel[(1,)](lists, count, pieces, shortest, BLOCK=8192, num_warps=16)
