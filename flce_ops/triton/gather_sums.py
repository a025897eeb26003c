"""Sums of gathered rows: a sparse matrix times a dense one, in float32, each result written once.

                 list of r                   D
    r   │ id, value │ id, value │ ...   ┌───────────┐
              └─────────────────────────│  row id   │      out_r = sum_k value_k table[id_k]
                                        └───────────┘
A program makes BLOCK_D columns of one result and reads eight rows of the table at a time. What limits it is the L2: with
blocks of columns outermost, frequent rows stay there. H200, 8192 tokens, 352 entries a row, 23.6 GB of rows of
linear_weight (128256, 4096): 2.7 ms, 8.8 TB/s, with 512 columns and 2 warps; 3.1 ms with 1024 and 4, 8.0 with sixteen
rows at a time, whose sum crosses warps.

Few classes have most of the entries of grad_linear_weight: those with more than a piece's length are cut in pieces,
whose sums are added in their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.replay import Kernel
from flce_ops.triton.sparse_lists import Lists

# n lists, D hidden, V vocabulary

AT_A_TIME = tl.constexpr(8)
COLUMNS_OF_WARP = 256  # 16 bytes a thread


class Pieces(NamedTuple):
    """Of lists that are longer than one: at most P."""

    length: Tensor  # () int32
    behind: Tensor  # (V,) int32, pieces of this list and of those before it; a list of one piece's length has none
    sums: Tensor  # (P, D) float32


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


@Kernel
@triton.jit
def gather_rows_kernel(
    entries_ptr,  # (n, R)
    count_ptr,  # (n,)
    table_ptr,  # (V, D)
    out_ptr,  # (n, D)
    n,
    D,
    R,
    stride_row,
    stride_d,
    stride_out,
    BLOCK_D: tl.constexpr,
):
    """Each row has a list of its own."""
    row = (tl.program_id(0) % n).to(tl.int64)
    d = tl.program_id(0) // n * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    count = tl.load(count_ptr + row)
    acc = gathered_sum(entries_ptr + row * R, 0, count, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
    tl.store(out_ptr + row * stride_out + d, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_or_add(out_ptr, values, mask, ADD: tl.constexpr):
    if ADD:
        values += tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr, values.to(out_ptr.dtype.element_ty), mask=mask)


@Kernel
@triton.jit
def gather_classes_kernel(
    entries_ptr,  # (entries,), class by class
    behind_ptr,  # (V,) where the classes end
    pieces,  # Pieces
    table_ptr,  # (N, D)
    out_ptr,  # (V, D)
    V,
    D,
    stride_row,
    stride_d,
    stride_out,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    v = (tl.program_id(0) % V).to(tl.int64)
    d = tl.program_id(0) // V * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    begin = tl.load(behind_ptr + v - 1, mask=v > 0, other=0)
    end = tl.load(behind_ptr + v)
    if end - begin <= tl.load(pieces.length):
        acc = gathered_sum(entries_ptr, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
        store_or_add(out_ptr + v * stride_out + d, acc, mask, ADD)


@triton.jit
def class_of_piece(behind_ptr, piece, V, STEPS: tl.constexpr):
    """The first class behind which there are more pieces."""
    low, high = 0, V
    for _ in range(STEPS):
        middle = (low + high) // 2
        past = tl.load(behind_ptr + middle) > piece
        high = tl.where(past, middle, high)
        low = tl.where(past, low, tl.minimum(middle + 1, V - 1))
    return low


@Kernel
@triton.jit
def gather_pieces_kernel(
    entries_ptr,  # (entries,), class by class
    behind_ptr,  # (V,)
    pieces,  # Pieces
    table_ptr,  # (N, D)
    P,
    V,
    D,
    stride_row,
    stride_d,
    STEPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    piece = tl.program_id(0) % P
    d = tl.program_id(0) // P * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    if piece < tl.load(pieces.behind + V - 1):
        v = class_of_piece(pieces.behind, piece, V, STEPS)
        number = piece - tl.load(pieces.behind + v - 1, mask=v > 0, other=0)
        length = tl.load(pieces.length)
        begin = tl.load(behind_ptr + v - 1, mask=v > 0, other=0) + number * length
        end = tl.minimum(begin + length, tl.load(behind_ptr + v))
        acc = gathered_sum(entries_ptr, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
        tl.store(pieces.sums + piece.to(tl.int64) * D + d, acc, mask=mask)


@Kernel
@triton.jit
def add_pieces_kernel(
    pieces,  # Pieces
    out_ptr,  # (V, D)
    P,
    V,
    D,
    stride_out,
    STEPS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The program of a class's first piece adds all of them."""
    piece = tl.program_id(0) % P
    d = tl.program_id(0) // P * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    if piece < tl.load(pieces.behind + V - 1):
        v = class_of_piece(pieces.behind, piece, V, STEPS)
        if piece == tl.load(pieces.behind + v - 1, mask=v > 0, other=0):
            acc = tl.zeros((BLOCK_D,), tl.float32)
            for k in range(piece, tl.load(pieces.behind + v)):
                acc += tl.load(pieces.sums + tl.full((), k, tl.int64) * D + d, mask=mask, other=0.0)
            store_or_add(out_ptr + v.to(tl.int64) * stride_out + d, acc, mask, ADD)


def block_of(hidden: int, at_most: int) -> dict[str, int]:
    """Columns and warps of a program."""
    block = min(at_most, max(COLUMNS_OF_WARP, triton.next_power_of_2(hidden)))
    return {"BLOCK_D": block, "num_warps": block // COLUMNS_OF_WARP}


def launch_gather_rows(lists: Lists, table: Tensor, out: Tensor) -> None:
    """out (n, D), of the n lists' rows."""
    n, hidden = out.shape
    block = block_of(hidden, 512)
    gather_rows_kernel[(n * triton.cdiv(hidden, block["BLOCK_D"]),)](
        lists.entries,
        lists.count,
        table,
        out,
        n,
        hidden,
        lists.entries.stride(0),
        *table.stride(),
        out.stride(0),
        **block,
    )


def launch_gather_classes(
    entries: Tensor,  # int64, class by class
    behind: Tensor,  # (V,) int32
    pieces: Pieces,
    table: Tensor,  # (N, D)
    out: Tensor,  # (V, D)
    *,
    add: bool,
) -> None:
    num_classes, hidden = out.shape
    most = pieces.sums.shape[0]
    block = block_of(hidden, 1024)
    across, steps = triton.cdiv(hidden, block["BLOCK_D"]), num_classes.bit_length()
    gather_pieces_kernel[(most * across,)](
        entries, behind, pieces, table, most, num_classes, hidden, *table.stride(), STEPS=steps, **block
    )
    gather_classes_kernel[(num_classes * across,)](
        entries, behind, pieces, table, out, num_classes, hidden, *table.stride(), out.stride(0), ADD=add, **block
    )
    add_pieces_kernel[(most * across,)](
        pieces, out, most, num_classes, hidden, out.stride(0), STEPS=steps, ADD=add, **block
    )
