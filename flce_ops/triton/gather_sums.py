"""Sums of gathered rows: a sparse matrix times a dense one, in float32, each result written once.

                 list of r                   D
    r   │ id, value │ id, value │ ...   ┌───────────┐
              └─────────────────────────│  row id   │      out_r = sum_k value_k table[id_k]
                                        └───────────┘
A program makes BLOCK_D columns of one result and reads eight rows of the table at a time. What limits it is the L2:
with blocks of columns outermost, frequent rows stay there. H200, 8192 tokens, 352 entries a row, 23.6 GB of rows of
linear_weight (128256, 4096): 2.7 ms, 8.8 TB/s, with 512 columns and 2 warps; 3.1 ms with 1024 and 4, 8.0 with sixteen
rows at a time, whose sum crosses warps.

Few classes have most of the entries of grad_linear_weight: those with more than a piece's length are cut in pieces,
whose sums are added in their order.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.class_order import Classes
from flce_ops.triton.live_tiles import LIVE
from flce_ops.triton.replay import Kernel
from flce_ops.triton.sparse_lists import Lists

# n lists, D hidden, V vocabulary

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
    ADD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Each row has a list of its own."""
    row = (tl.program_id(0) % n).to(tl.int64)
    d = tl.program_id(0) // n * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.load(count_ptr + row)
    columns = D
    if ADD:
        columns = tl.where(count > 0, D, 0)
    mask = d < columns
    acc = gathered_sum(entries_ptr + row * R, 0, count, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
    store_or_add(out_ptr + row * stride_out + d, acc, mask, ADD)


@Kernel
@triton.jit
def gather_classes_kernel(
    classes,  # Classes
    is_dense_ptr,  # (B,) of DenseClasses: what is left as it is; None for none
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
    """Of classes that are not cut."""
    v = (tl.program_id(0) % V).to(tl.int64)
    dense = 0
    if is_dense_ptr is not None:
        dense = tl.load(is_dense_ptr + v // LIVE)
    if dense == 0:
        d = tl.program_id(0) // V * BLOCK_D + tl.arange(0, BLOCK_D)
        mask = d < D
        begin, end = tl.load(classes.behind + v - 1, mask=v > 0, other=0), tl.load(classes.behind + v)
        if end - begin <= tl.load(classes.length):
            acc = gathered_sum(classes.entries, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
            store_or_add(out_ptr + v * stride_out + d, acc, mask, ADD)


@triton.jit
def class_of_piece(pieces_ptr, piece, V, STEPS: tl.constexpr):
    """The first class behind which there are more pieces, and its first piece."""
    low, high = 0, V
    for _ in range(STEPS):
        middle = (low + high) // 2
        past = tl.load(pieces_ptr + middle) > piece
        high = tl.where(past, middle, high)
        low = tl.where(past, low, tl.minimum(middle + 1, V - 1))
    return low, tl.load(pieces_ptr + low - 1, mask=low > 0, other=0)


@Kernel
@triton.jit
def gather_pieces_kernel(
    classes,  # Classes
    sums_ptr,  # (P, D) float32, out
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
    if piece < tl.load(classes.pieces + V - 1):
        v, first = class_of_piece(classes.pieces, piece, V, STEPS)
        length = tl.load(classes.length)
        begin = tl.load(classes.behind + v - 1, mask=v > 0, other=0) + (piece - first) * length
        end = tl.minimum(begin + length, tl.load(classes.behind + v))
        acc = gathered_sum(classes.entries, begin, end, table_ptr, stride_row, stride_d, d, mask, BLOCK_D)
        tl.store(sums_ptr + piece.to(tl.int64) * D + d, acc, mask=mask)


@Kernel
@triton.jit
def add_pieces_kernel(
    classes,  # Classes
    sums_ptr,  # (P, D)
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
    if piece < tl.load(classes.pieces + V - 1):
        v, first = class_of_piece(classes.pieces, piece, V, STEPS)
        if piece == first:
            acc = tl.zeros((BLOCK_D,), tl.float32)
            for k in range(piece, tl.load(classes.pieces + v)):
                acc += tl.load(sums_ptr + tl.full((), k, tl.int64) * D + d, mask=mask, other=0.0)
            store_or_add(out_ptr + v.to(tl.int64) * stride_out + d, acc, mask, ADD)


def block_of(hidden: int, at_most: int) -> dict[str, int]:
    """Columns and warps of a program."""
    block = min(at_most, max(COLUMNS_OF_WARP, triton.next_power_of_2(hidden)))
    return {"BLOCK_D": block, "num_warps": block // COLUMNS_OF_WARP}


def launch_gather_rows(lists: Lists, table: Tensor, out: Tensor, *, add: bool) -> None:
    """out (n, D), of the n lists' rows."""
    n, hidden = out.shape
    block = block_of(hidden, 512)
    gather_rows_kernel[(n * triton.cdiv(hidden, block["BLOCK_D"]),)](
        lists.entries,
        lists.lengths,
        table,
        out,
        n,
        hidden,
        lists.entries.stride(0),
        *table.stride(),
        out.stride(0),
        ADD=add,
        **block,
    )


def launch_gather_classes(
    classes: Classes,
    is_dense: Tensor | None,  # (B,) of DenseClasses
    sums: Tensor,  # (P, D) float32, memory
    table: Tensor,  # (N, D)
    out: Tensor,  # (V, D)
    *,
    add: bool,
) -> None:
    num_classes, hidden = out.shape
    most = sums.shape[0]
    block = block_of(hidden, 1024)
    across, steps = triton.cdiv(hidden, block["BLOCK_D"]), num_classes.bit_length()
    gather_pieces_kernel[(most * across,)](
        classes, sums, table, most, num_classes, hidden, *table.stride(), STEPS=steps, **block
    )
    gather_classes_kernel[(num_classes * across,)](
        classes, is_dense, table, out, num_classes, hidden, *table.stride(), out.stride(0), ADD=add, **block
    )
    add_pieces_kernel[(most * across,)](
        classes, sums, out, most, num_classes, hidden, out.stride(0), STEPS=steps, ADD=add, **block
    )
