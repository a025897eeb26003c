"""The tokens that count, first: what is ignored costs no time, and the host never knows how much that is.

    order   the kept tokens' indices in ascending order,       kernels walk it, n places at a time
            then the ignored ones'
    total   how many there are, a number on the device         kernels stop there
    place   each token's place in `order`, -1 where ignored    brings rows back in the end                spread_rows.py

The host launches the chunks that all N tokens would take. A kernel of a chunk without kept tokens leaves at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.replay import Kernel

# N tokens, n places of a chunk

ROW_MULTIPLE = tl.constexpr(128)  # rows of the largest tile: rows up to a multiple of it are zeros behind the kept ones


class Kept(NamedTuple):
    """The places [start, start + n) of `order`; one argument of a kernel."""

    order: Tensor  # (n,) int32
    total: Tensor  # () int32, kept tokens of all chunks
    start: int

    def of(self, rows: slice) -> "Kept":
        return Kept(self.order[rows], self.total, self.start + rows.start)


@triton.jit
def kept_rows(kept, n):
    """How many of a chunk's n rows hold a token."""
    return tl.minimum(tl.maximum(tl.load(kept.total) - kept.start, 0), n)


@Kernel
@triton.jit
def keep_tokens_kernel(
    target_ptr,  # (N,)
    order_ptr,  # (N,) int32, out
    place_ptr,  # (N,) int32, out
    count_ptr,  # () int32, out
    in_range_ptr,  # () bool, out: whether all targets are classes; or None
    N,
    ignore_index,
    num_classes,
    BLOCK: tl.constexpr,
):
    """One program: N = 131072 takes 32 rounds of a few microseconds."""
    count = tl.zeros((), tl.int32)
    wrong = tl.zeros((), tl.int32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + i, mask=i < N, other=0).to(tl.int64)
        keep = ((target != ignore_index) & (i < N)).to(tl.int32)
        place = count + tl.cumsum(keep, 0) - 1
        behind = N - 1 - (i - place - 1)  # i - place - 1 ignored tokens stand before this one
        tl.store(order_ptr + tl.where(keep > 0, place, behind), i, mask=i < N)
        tl.store(place_ptr + i, tl.where(keep > 0, place, -1), mask=i < N)
        if in_range_ptr is not None:
            outside = (target < 0) | (target >= num_classes)
            wrong += tl.sum(keep * outside.to(tl.int32), 0)
        count += tl.sum(keep, 0)
    tl.store(count_ptr, count)
    if in_range_ptr is not None:
        tl.store(in_range_ptr, wrong == 0)


def keep_tokens(
    target: Tensor,  # (N,)
    ignore_index: int,
    num_classes: int,
    in_range: Tensor | None = None,  # () bool, out: whether all targets are in [0, num_classes)
) -> tuple[Kept, Tensor]:  # (N,)
    """The kept tokens and every token's place."""
    tokens = target.shape[0]
    order, place = target.new_empty(2, tokens, dtype=torch.int32).unbind()
    count = target.new_empty((), dtype=torch.int32)
    keep_tokens_kernel[(1,)](
        target, order, place, count, in_range, tokens, ignore_index, num_classes, BLOCK=4096, num_warps=8
    )
    return Kept(order, count, 0), place
