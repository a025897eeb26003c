"""Sums of gathered rows: a sparse matrix times a dense one, in float32. Each result is written once.

                 list of r                   D
    r   │ id, value │ id, value │ ...   ┌───────────┐
              └─────────────────────────│  row id   │      out_r = sum_k value_k table[id_k]
                                        └───────────┘
A program computes BLOCK_D columns of one result and reads eight rows of the table at a time. The bandwidth of the L2
limits it. Programs of the same block of columns run one after another, so frequent rows stay in the L2. H200, 8192
tokens, 352 entries per row, 23.6 GB of rows of linear_weight (128256, 4096): 2.7 ms, 8.8 TB/s, with 512 columns and 2
warps; 3.1 ms with 1024 and 4, 8.0 with sixteen rows at a time, whose sum crosses warps.

Lists of very different lengths are split, so that no program walks a long list alone. The sums of the splits are added
in order:

    split    = max(2 / P of all entries, the shortest)          so there are at most P splits
    splits_i = ceil(length_i / split) if length_i > split, else 0; the table holds running totals of these numbers

A few classes have most of the entries of grad_linear_weight, and a few tokens have twenty times as many as the others:
at a threshold of 2^-12 a trained model's tokens keep 200 on average, and some keep 4,000. A program adds eight entries
at a time and waits for memory each time, so a program with a long list would outlast all others. If 3 tokens in 100
keep 2,000 to 3,000 entries (8192x1024x50304), grad_input takes 1.9 ms, and 0.8 ms in splits of 512.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..gemm.class_blocks import LIVE
from ..launch.replay import Kernel

# L lists, D hidden, T rows of the table, P splits at most

AT_A_TIME = tl.constexpr(8)
COLUMNS_OF_WARP = 256  # a thread reads 16 bytes


class SplitLists(NamedTuple):
    """Lists of entries. Lists longer than `split` are cut into several splits; `splits` holds the running total of
    their numbers.
    """

    entries: Tensor  # int64: a float32 value in the upper half, the index of a row in the lower
    lengths: Tensor  # (L,) int32
    behind: Tensor | None  # (L,) int32, the end of each list in `entries`; None: list i begins at i times `room`
    split: Tensor  # () int32
    splits: Tensor  # (L,) int32
    room: int = 0


@triton.jit
def bounds(lists, i):
    """Returns the int64 positions in `entries` where list i begins and ends."""
    length = tl.load(lists.lengths + i).to(tl.int64)
    if lists.behind is None:
        begin = i.to(tl.int64) * lists.room
    else:
        begin = tl.load(lists.behind + i).to(tl.int64) - length
    return begin, begin + length


@triton.jit
def list_of_split(lists, split, L, steps):
    """Binary search for the list that `split` belongs to. Returns the list and its first split."""
    low, high = 0, L
    for _ in range(steps):
        middle = (low + high) // 2
        past = tl.load(lists.splits + middle) > split
        high = tl.where(past, middle, high)
        low = tl.where(past, low, tl.minimum(middle + 1, L - 1))
    return low, tl.load(lists.splits + low - 1, mask=low > 0, other=0)


@Kernel
def split_lists_kernel(
    lists,  # SplitLists; writes `behind`, `split` and `splits`
    L,
    P,
    shortest,
    BLOCK: tl.constexpr,
):
    """One program. The sum of ceil(length / split) over lengths > split is at most 2 / split of all entries."""
    entries = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        entries += tl.load(lists.lengths + i, mask=i < L, other=0)
    split = tl.maximum(tl.cdiv(2 * tl.sum(entries.to(tl.int64), 0), P), shortest).to(tl.int32)
    tl.store(lists.split, split)
    behind = tl.zeros((), tl.int32)
    splits = tl.zeros((), tl.int32)
    for start in range(0, L, BLOCK):
        i = start + tl.arange(0, BLOCK)
        length = tl.load(lists.lengths + i, mask=i < L, other=0)
        cut = tl.where(length > split, tl.cdiv(length, split), 0)
        tl.store(lists.splits + i, splits + tl.cumsum(cut, 0), mask=i < L)
        splits += tl.sum(cut, 0)
        if lists.behind is not None:
            tl.store(lists.behind + i, behind + tl.cumsum(length, 0), mask=i < L)
            behind += tl.sum(length, 0)


def launch_split_lists(
    lists: SplitLists,  # writes `behind`, `split` and `splits`
    shortest: int,  # the shortest split
    splits: int,  # the most splits
) -> None:
    count = lists.lengths.shape[0]
    split_lists_kernel[(1,)](lists, count, splits, shortest, BLOCK=8192, num_warps=16)


@triton.jit
def store_or_add(out_ptr, values, mask, ADD: tl.constexpr):
    if ADD:
        values += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, values.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
def gather_lists_kernel(
    lists,  # SplitLists
    is_dense_ptr,  # for each group of LIVE lists: 1 if their results stay unchanged; None: all results are written
    table_ptr,  # (T, D)
    out_ptr,  # (L, D) out; with OF_SPLITS (P, D)
    P,
    L,
    D,
    table_stride,  # (between rows, between columns)
    stride_out,
    steps,  # steps of a binary search among the lists
    OF_SPLITS: tl.constexpr,  # sums the splits of cut lists; otherwise the lists that are not cut
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    count = P if OF_SPLITS else L
    number = tl.program_id(0) % count
    d = tl.program_id(0) // count * BLOCK_D + tl.arange(0, BLOCK_D)
    wanted = 1
    if OF_SPLITS:
        wanted = (number < tl.load(lists.splits + L - 1)).to(tl.int32)
    elif is_dense_ptr is not None:
        wanted = 1 - tl.load(is_dense_ptr + number // LIVE)
    if wanted == 1:
        split = tl.load(lists.split)
        if OF_SPLITS:
            i, first = list_of_split(lists, number, L, steps)
            begin, end = bounds(lists, i)
            begin += (number - first) * split
            end = tl.minimum(begin + split, end)
        else:
            begin, end = bounds(lists, number)
        if end - begin <= split:
            mask = d < D
            if ADD:
                mask = mask & (end > begin)
            acc = tl.zeros((BLOCK_D,), tl.float32)
            for k in range(begin, end, AT_A_TIME):
                at = k + tl.arange(0, AT_A_TIME)
                entries = tl.load(lists.entries + at, mask=at < end, other=0)
                rows = (entries & 0xFFFFFFFF)[:, None] * table_stride[0] + d.to(tl.int64)[None, :] * table_stride[1]
                values = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                table = tl.load(table_ptr + rows, mask=(at < end)[:, None] & mask[None, :], other=0.0)
                acc += tl.sum(table.to(tl.float32) * values[:, None], 0)
            store_or_add(out_ptr + number.to(tl.int64) * stride_out + d, acc, mask, ADD)


@Kernel
def add_splits_kernel(
    lists,  # SplitLists
    sums_ptr,  # (P, D)
    out_ptr,  # (L, D)
    P,
    L,
    D,
    stride_out,
    steps,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The program of a list's first split adds the sums of all its splits."""
    number = tl.program_id(0) % P
    d = tl.program_id(0) // P * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    if number < tl.load(lists.splits + L - 1):
        i, first = list_of_split(lists, number, L, steps)
        if number == first:
            acc = tl.zeros((BLOCK_D,), tl.float32)
            for k in range(number, tl.load(lists.splits + i)):
                acc += tl.load(sums_ptr + tl.full((), k, tl.int64) * D + d, mask=mask, other=0.0)
            store_or_add(out_ptr + i.to(tl.int64) * stride_out + d, acc, mask, ADD)


def launch_gather_lists(
    lists: SplitLists,
    sums: Tensor,  # (P, D) float32, memory
    table: Tensor,  # (T, D)
    out: Tensor,  # (L, D)
    *,
    add: bool,
    columns: int,  # columns of a program, at most
    is_dense: Tensor | None = None,  # (ceil(L / LIVE),) int32, lists whose results are left unchanged
) -> None:
    count, hidden = out.shape
    most = sums.shape[0]
    block = min(columns, max(COLUMNS_OF_WARP, triton.next_power_of_2(hidden)))
    options = {"BLOCK_D": block, "num_warps": block // COLUMNS_OF_WARP}
    across, sizes, steps = triton.cdiv(hidden, block), (most, count, hidden), count.bit_length()
    gather_lists_kernel[(most * across,)](
        lists, None, table, sums, *sizes, table.stride(), hidden, steps, OF_SPLITS=True, ADD=False, **options
    )
    gather_lists_kernel[(count * across,)](
        lists, is_dense, table, out, *sizes, table.stride(), out.stride(0), steps, OF_SPLITS=False, ADD=add, **options
    )
    add_splits_kernel[(most * across,)](lists, sums, out, *sizes, out.stride(0), steps, ADD=add, **options)
