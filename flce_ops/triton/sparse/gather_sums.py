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
in order, by the program of the list:

    split    = max(2 / P of all entries, SPLIT)                 so there are at most P splits
    splits_i = ceil(length_i / split) if length_i > split, else 0; the table holds running totals of these numbers

A few classes have most of the entries of grad_linear_weight, and a few tokens have twenty times as many as the others:
at a threshold of 2^-12 a trained model's tokens keep 200 on average, and some keep 4,000. A program adds eight entries
at a time and waits for memory each time, so a program with a long list would outlast all others. If 3 tokens in 100
keep 2,000 to 3,000 entries (8192x1024x50304), grad_input takes 1.9 ms, and 0.8 ms in splits of 512.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv, next_power_of_2
from ..gemm.tiles import LIVE
from ..kernel import Kernel, everywhere

# L lists, D hidden, T rows of the table, P splits at most

AT_A_TIME = tl.constexpr(8)
COLUMNS_OF_WARP = 256  # a thread reads 16 bytes
TOKEN_COLUMNS, CLASS_COLUMNS = 512, 1024  # columns of one program, for lists of tokens and of classes
# Lists with more entries than this are cut. The sums over the lists of classes take 3.0 ms; 3.1 with a SPLIT of 1024,
# 3.7 with 128 (8192x4096x128256). A step in which 3 tokens in 100 keep 2,000 to 3,000 entries at a threshold of 2^-12
# takes 3.7 ms; 4.1 with 512, 4.7 with 1024, 5.2 if no list is cut (8192x1024x50304).
SPLIT = 256
LENGTHS = tl.constexpr(8192)  # lists that a program reads the length of at a time
ENTRIES_OF_WALKER = 1024


class Lists(NamedTuple):
    """Lists of entries, in the order of the tokens or of the classes. Passed to kernels as one argument."""

    entries: Tensor  # int64: a float32 value in the upper half, the index of a row in the lower
    lengths: Tensor  # (L,)
    room: int = 0  # list i begins at i times `room`, unless `behind` is given
    behind: Tensor | None = None  # (L,), the end of each list in `entries`
    # Lists longer than `split` are cut into several splits. None: no list is cut
    split: Tensor | None = None  # () int32
    splits: Tensor | None = None  # (L,) int32, the running total of the numbers of splits

    @property
    def walkers(self) -> int:
        """The number of programs for a list with room. A few tokens fill their lists: at a threshold of 2^-12 a trained
        model keeps 200 entries per token on average, and 4,000 for some tokens.
        """
        return max(self.room // ENTRIES_OF_WALKER, 1)

    def of(self, rows: slice) -> "Lists":
        return self._replace(entries=self.entries[rows], lengths=self.lengths[rows])


@triton.jit
def bounds(lists, i):
    """Returns the int64 positions in `entries` where list i begins and ends."""
    length = tl.load(lists.lengths + i).to(tl.int64)
    if lists.behind is None:
        begin = tl.cast(i, tl.int64) * lists.room
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
    lists,  # Lists; writes `split`, `splits`, and `behind` if it is given
    L,
    P,
    shortest,
):
    """One program. The sum of ceil(length / split) over lengths > split is at most 2 / split of all entries."""
    entries = tl.zeros((LENGTHS,), tl.int32)
    for start in range(0, L, LENGTHS):
        i = start + tl.arange(0, LENGTHS)
        entries += tl.load(lists.lengths + i, mask=i < L, other=0)
    split = tl.maximum(tl.cdiv(2 * tl.sum(entries.to(tl.int64), 0), P), shortest).to(tl.int32)
    tl.store(lists.split, split)
    behind = tl.zeros((), tl.int32)
    splits = tl.zeros((), tl.int32)
    for start in range(0, L, LENGTHS):
        i = start + tl.arange(0, LENGTHS)
        length = tl.load(lists.lengths + i, mask=i < L, other=0)
        cut = tl.where(length > split, tl.cdiv(length, split), 0)
        tl.store(lists.splits + i, splits + tl.cumsum(cut, 0), mask=i < L)
        splits += tl.sum(cut, 0)
        if lists.behind is not None:
            tl.store(lists.behind + i, behind + tl.cumsum(length, 0), mask=i < L)
            behind += tl.sum(length, 0)


def cut_lists(lists: Lists, splits: int) -> Lists:
    """The lists, cut into at most `splits` splits. Their `behind` is written if it is given."""
    lengths = lists.lengths
    lists = lists._replace(split=lengths.new_empty(()), splits=lengths.new_empty(lengths.shape))
    split_lists_kernel[(1,)](lists, lengths.shape[0], splits, SPLIT, num_warps=16)
    return lists


@triton.jit
def add_rows(acc, lists, begin, end, table_ptr, table_stride, d, mask):
    """Adds the rows of the entries between two places, times their values."""
    for k in range(begin, end, AT_A_TIME):
        at = k + tl.arange(0, AT_A_TIME)
        entries = tl.load(lists.entries + at, mask=at < end, other=0)
        rows = (entries & 0xFFFFFFFF)[:, None] * table_stride[0] + d.to(tl.int64)[None, :] * table_stride[1]
        values = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        table = tl.load(table_ptr + rows, mask=(at < end)[:, None] & mask[None, :], other=0.0)
        acc += tl.sum(table.to(tl.float32) * values[:, None], 0)
    return acc


@Kernel
def sum_splits_kernel(
    lists,  # Lists
    table_ptr,  # (T, D)
    sums_ptr,  # (P, D) out
    P,
    L,
    D,
    table_stride,  # (between rows, between columns)
    steps,  # steps of a binary search among the lists
    BLOCK_D: tl.constexpr,
):
    number = tl.program_id(0) % P
    d = tl.program_id(0) // P * BLOCK_D + tl.arange(0, BLOCK_D)
    if number < tl.load(lists.splits + L - 1):
        split = tl.load(lists.split)
        i, first = list_of_split(lists, number, L, steps)
        begin, end = bounds(lists, i)
        begin += (number - first) * split
        acc = tl.zeros((BLOCK_D,), tl.float32)
        acc = add_rows(acc, lists, begin, tl.minimum(begin + split, end), table_ptr, table_stride, d, d < D)
        tl.store(sums_ptr + number.to(tl.int64) * D + d, acc, mask=d < D)


@Kernel
def sum_lists_kernel(
    lists,  # Lists
    sums_ptr,  # (P, D), of the splits; None if no list is cut
    is_dense_ptr,  # for each group of LIVE lists: 1 if their results stay unchanged; None: all results are written
    table_ptr,  # (T, D)
    out_ptr,  # (L, D) out
    L,
    D,
    table_stride,  # (between rows, between columns)
    stride_out,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i = tl.program_id(0) % L
    d = tl.program_id(0) // L * BLOCK_D + tl.arange(0, BLOCK_D)
    wanted = 1
    if is_dense_ptr is not None:
        wanted = 1 - tl.load(is_dense_ptr + i // LIVE)
    if wanted == 1:
        begin, end = bounds(lists, i)
        mask = d < D
        if ADD:
            mask = mask & everywhere(end > begin, d)
        acc = tl.zeros((BLOCK_D,), tl.float32)
        if sums_ptr is not None:
            first = tl.load(lists.splits + i - 1, mask=i > 0, other=0)
            last = tl.load(lists.splits + i)
            for k in range(first, last):
                acc += tl.load(sums_ptr + tl.full((), k, tl.int64) * D + d, mask=mask, other=0.0)
            begin = tl.where(first < last, end, begin)
        acc = add_rows(acc, lists, begin, end, table_ptr, table_stride, d, mask)
        places = out_ptr + i.to(tl.int64) * stride_out + d
        if ADD:
            acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch_gather_lists(
    lists: Lists,
    table: Tensor,  # (T, D)
    out: Tensor,  # (L, D)
    *,
    add: bool,
    columns: int,  # columns of a program, at most
    splits: int = 0,  # P, if lists are cut
    is_dense: Tensor | None = None,  # (ceil(L / LIVE),) int32, lists whose results are left unchanged
) -> None:
    (count, hidden), stride = out.shape, table.stride()
    block = min(columns, max(COLUMNS_OF_WARP, next_power_of_2(hidden)))
    options = {"BLOCK_D": block, "num_warps": block // COLUMNS_OF_WARP}
    across, sums = cdiv(hidden, block), None
    if splits:
        sums = out.new_empty(splits, hidden, dtype=torch.float32)
        of_splits = lists, table, sums, splits, count, hidden, stride, count.bit_length()
        sum_splits_kernel[(splits * across,)](*of_splits, **options)
    of_lists = lists, sums, is_dense, table, out, count, hidden, stride, out.stride(0)
    sum_lists_kernel[(count * across,)](*of_lists, ADD=add, **options)
