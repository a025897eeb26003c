"""Sums of gathered rows: a sparse matrix times a dense one, in float32, each result written once.

                 list of r                   D
    r   │ id, value │ id, value │ ...   ┌───────────┐
              └─────────────────────────│  row id   │      out_r = sum_k value_k table[id_k]
                                        └───────────┘
A program makes BLOCK_D columns of one result and reads eight rows of the table at a time. What limits it is the L2:
with blocks of columns outermost, frequent rows stay there. H200, 8192 tokens, 352 entries a row, 23.6 GB of rows of
linear_weight (128256, 4096): 2.7 ms, 8.8 TB/s, with 512 columns and 2 warps; 3.1 ms with 1024 and 4, 8.0 with sixteen
rows at a time, whose sum crosses warps.

Long lists are cut in pieces, whose sums are added in their order (cut_lists.py).
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.cut_lists import CutLists, bounds, list_of_piece
from flce_ops.triton.live_tiles import LIVE
from flce_ops.triton.replay import Kernel

# L lists, D hidden, T rows of the table, P pieces at most

AT_A_TIME = tl.constexpr(8)
COLUMNS_OF_WARP = 256  # 16 bytes a thread


@triton.jit
def gathered_sum(entries_ptr, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D: tl.constexpr):
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for k in range(begin, end, AT_A_TIME):
        at = k + tl.arange(0, AT_A_TIME)
        entries = tl.load(entries_ptr + at, mask=at < end, other=0)
        rows = (entries & 0xFFFFFFFF)[:, None] * stride_row + d.to(tl.int64)[None, :] * stride_d
        values = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        table = tl.load(table_ptr + rows, mask=(at < end)[:, None] & mask[None, :], other=0.0)
        acc += tl.sum(table.to(tl.float32) * values[:, None], 0)
    return acc


@triton.jit
def store_or_add(out_ptr, values, mask, ADD: tl.constexpr):
    if ADD:
        values += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, values.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def gather_lists_kernel(
    lists,  # CutLists
    is_dense_ptr,  # for each LIVE lists, whether what they would give is left as it is; None for none
    table_ptr,  # (T, D)
    out_ptr,  # (L, D)
    L,
    D,
    room,
    stride_row,
    stride_d,
    stride_out,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Of lists that are not cut."""
    i = tl.program_id(0) % L
    dense = 0
    if is_dense_ptr is not None:
        dense = tl.load(is_dense_ptr + i // LIVE)
    if dense == 0:
        d = tl.program_id(0) // L * BLOCK_D + tl.arange(0, BLOCK_D)
        begin, end = bounds(lists, i, room)
        if end - begin <= tl.load(lists.piece):
            mask = d < D
            if ADD:
                mask = mask & (end > begin)
            acc = gathered_sum(lists.entries, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
            store_or_add(out_ptr + i.to(tl.int64) * stride_out + d, acc, mask, ADD)


@Kernel
@triton.jit
def gather_pieces_kernel(
    lists,  # CutLists
    sums_ptr,  # (P, D) float32, out
    table_ptr,  # (T, D)
    P,
    L,
    D,
    room,
    stride_row,
    stride_d,
    steps,  # of a search among the lists
    BLOCK_D: tl.constexpr,
):
    number = tl.program_id(0) % P
    d = tl.program_id(0) // P * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    if number < tl.load(lists.pieces + L - 1):
        i, first = list_of_piece(lists.pieces, number, L, steps)
        piece = tl.load(lists.piece)
        begin, end = bounds(lists, i, room)
        begin += (number - first) * piece
        end = tl.minimum(begin + piece, end)
        acc = gathered_sum(lists.entries, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
        tl.store(sums_ptr + number.to(tl.int64) * D + d, acc, mask=mask)


@Kernel
@triton.jit
def add_pieces_kernel(
    lists,  # CutLists
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
    """The program of a list's first piece adds all of them."""
    number = tl.program_id(0) % P
    d = tl.program_id(0) // P * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    if number < tl.load(lists.pieces + L - 1):
        i, first = list_of_piece(lists.pieces, number, L, steps)
        if number == first:
            acc = tl.zeros((BLOCK_D,), tl.float32)
            for k in range(number, tl.load(lists.pieces + i)):
                acc += tl.load(sums_ptr + tl.full((), k, tl.int64) * D + d, mask=mask, other=0.0)
            store_or_add(out_ptr + i.to(tl.int64) * stride_out + d, acc, mask, ADD)


def launch_gather_lists(
    lists: CutLists,
    sums: Tensor,  # (P, D) float32, memory
    table: Tensor,  # (T, D)
    out: Tensor,  # (L, D)
    *,
    add: bool,
    columns: int,  # of a program, at most
    room: int = 0,  # of a list, where they do not stand one after the other
    is_dense: Tensor | None = None,  # (ceil(L / LIVE),) int32: left as they are
) -> None:
    count, hidden = out.shape
    most = sums.shape[0]
    block = min(columns, max(COLUMNS_OF_WARP, triton.next_power_of_2(hidden)))
    options = {"BLOCK_D": block, "num_warps": block // COLUMNS_OF_WARP}
    across, steps = triton.cdiv(hidden, block), count.bit_length()
    gather_pieces_kernel[(most * across,)](
        lists, sums, table, most, count, hidden, room, *table.stride(), steps, **options
    )
    gather_lists_kernel[(count * across,)](
        lists, is_dense, table, out, count, hidden, room, *table.stride(), out.stride(0), ADD=add, **options
    )
    add_pieces_kernel[(most * across,)](
        lists, sums, out, most, count, hidden, out.stride(0), steps, ADD=add, **options
    )
