"""Puts the valid tokens first, so that ignored tokens cost no time, although the host never knows how many there are.

    order   the valid tokens' indices in ascending order,      a chunk reads n entries of it
            then those of ignored tokens
    total   the number of valid tokens, on the device          kernels stop there
    place   each token's place in `order`, -1 if ignored       moves rows back at the end                after_chunks.py

A token of weight 0 arrives here as an ignored one (without_weightless in
math/token_weights_and_denominator.py). The flag of a target outside [0, V) is set here, too. The host launches the
chunks that all N tokens would take. Kernels of a chunk without valid tokens return immediately.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..kernel import Kernel

# N tokens, n places of a chunk

# Distances between rows are multiples of this. Triton's layouts, and so the order of sums, depend on whether 16 divides
# such a distance
APART = tl.constexpr(16)
# Rows of the largest tile. The rows after the valid ones, up to a multiple of this, are zeros.
ROW_MULTIPLE = tl.constexpr(128)


class ValidTokens(NamedTuple):
    """The places [start, start + n) of `order`. Passed to kernels as one argument."""

    order: Tensor  # (n,) int32
    total: Tensor  # () int32, valid tokens over all chunks
    start: int

    def of(self, rows: slice) -> "ValidTokens":
        return self._replace(order=self.order[rows], start=self.start + rows.start)


def room_for_rows(n: int) -> int:
    return cdiv(n, APART.value) * APART.value


def row_vectors(like: Tensor, count: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """`count` uninitialised vectors (n,). Each starts at a multiple of 16 bytes, as all that torch allocates."""
    return tuple(like.new_empty(n, dtype=dtype) for _ in range(count))


@triton.jit
def row_distance(n):
    """The distance between the rows of a (T, n) matrix made with room_for_rows."""
    return tl.cdiv(n, APART) * APART


@triton.jit
def valid_rows(valid_tokens, n):
    """How many of a chunk's n rows hold a valid token."""
    return tl.minimum(tl.maximum(tl.load(valid_tokens.total) - valid_tokens.start, 0), n)


@triton.jit
def padded_rows(count, n):
    """The valid rows and the rows of zeros after them."""
    return tl.minimum(tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE, n)


@Kernel
def compact_tokens_kernel(
    target_ptr,  # (N,)
    order_ptr,  # (N,) int32, out; None: only the count is wanted
    place_ptr,  # (N,) int32, out
    count_ptr,  # () int32, out
    in_range_ptr,  # () bool, out: whether all targets are classes; or None
    N,
    ignore_index,
    num_classes,
    BLOCK: tl.constexpr,
):
    """One program: N = 131072 takes 32 iterations of a few microseconds."""
    count = tl.zeros((), tl.int32)
    valid_tokens = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + i, mask=i < N, other=0).to(tl.int64)
        keep = ((target != ignore_index) & (i < N)).to(tl.int32)
        valid_tokens += keep
        wrong |= keep & ((target < 0) | (target >= num_classes)).to(tl.int32)
        if order_ptr is not None:
            place = count + tl.cumsum(keep, 0) - 1
            behind = N - 1 - (i - place - 1)  # i - place - 1 ignored tokens come before this one
            tl.store(order_ptr + tl.where(keep > 0, place, behind), i, mask=i < N)
            tl.store(place_ptr + i, tl.where(keep > 0, place, -1), mask=i < N)
            count += tl.sum(keep, 0)
    tl.store(count_ptr, tl.sum(valid_tokens, 0))
    if in_range_ptr is not None:
        tl.store(in_range_ptr, tl.max(wrong, 0) == 0)


@Kernel
def class_of_topk_kernel(
    target_ptr,  # (N, K)
    class_ptr,  # (N,) out
    N,
    ignore_index,
    num_classes,
    outside,  # a number that is neither a class nor ignore_index
    TOPK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """ignore_index if all K are ignored, `outside` if one is out of range, else the largest class."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    largest = tl.full((BLOCK_N,), -1, tl.int64)
    wrong = tl.zeros((BLOCK_N,), tl.int32)
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        mask = (i < N)[:, None] & (k < TOPK)[None, :]
        target = tl.load(target_ptr + i.to(tl.int64)[:, None] * TOPK + k[None, :], mask=mask, other=ignore_index)
        target = target.to(tl.int64)
        counts = target != ignore_index
        wrong |= tl.max((counts & ((target < 0) | (target >= num_classes))).to(tl.int32), 1)
        largest = tl.maximum(largest, tl.max(tl.where(counts, target, -1), 1))
    found = tl.where(wrong > 0, outside, tl.where(largest < 0, ignore_index, largest))
    tl.store(class_ptr + i, found.to(class_ptr.dtype.element_ty), mask=i < N)


def launch_class_of_topk(target: Tensor, ignore_index: int, num_classes: int) -> Tensor:  # (N, K) -> (N,)
    """One class in place of a token's K classes: it tells whether the token is valid and whether all classes are in
    range.
    """
    tokens, topk = target.shape
    found = target.new_empty(tokens)
    outside = num_classes + (ignore_index == num_classes)
    class_of_topk_kernel[(cdiv(tokens, 16),)](
        target, found, tokens, ignore_index, num_classes, outside, TOPK=topk, BLOCK_N=16, BLOCK_TOPK=64, num_warps=4
    )
    return found


def compact_tokens(
    target: Tensor,  # (N,) or (N, K)
    ignore_index: int,
    num_classes: int,
    in_range: Tensor | None = None,  # () bool, out: whether all targets are in [0, num_classes)
) -> tuple[ValidTokens, Tensor]:  # (N,)
    """The valid tokens, and the place of each token. A token with K targets is valid if any of them is."""
    if target.dim() == 2:
        target = launch_class_of_topk(target, ignore_index, num_classes)
    tokens = target.shape[0]
    order, place = row_vectors(target, 2, tokens, torch.int32)
    count = target.new_empty((), dtype=torch.int32)
    compact_tokens_kernel[(1,)](
        target, order, place, count, in_range, tokens, ignore_index, num_classes, BLOCK=4096, num_warps=8
    )
    return ValidTokens(order, count, 0), place


class Count(NamedTuple):
    """The number of valid tokens, for kernels that do not need their order. Passed to kernels as one argument."""

    total: Tensor  # () int32


def count_tokens(target: Tensor, ignore_index: int, num_classes: int, in_range: Tensor) -> Count:
    """Counts without computing `order`. The running sum that `order` needs would take 2 % of a step at 16384 tokens."""
    total, tokens = target.new_empty((), dtype=torch.int32), target.shape[0]
    compact_tokens_kernel[(1,)](
        target, None, None, total, in_range, tokens, ignore_index, num_classes, BLOCK=8192, num_warps=16
    )
    return Count(total)
