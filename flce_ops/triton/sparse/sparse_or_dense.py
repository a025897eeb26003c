"""Decides on the device for which blocks of classes GEMMs are faster than lists. These blocks get their exact gradient.

kept_b are the entries that a token is expected to keep in block b:

    kept_b  = sum over a block's classes of min(|p - onehot| / threshold, 1), averaged over some tokens
    dense_b = kept_b > LIVE / CLASSES_PER_ENTRY

A gather reads 2 D bytes an entry from the L2, at 8 TB/s on an H200. A GEMM takes 2 D operations for each class and
token, at 700 TFLOP/s. According to these numbers, one entry takes as long as 87 classes. Measured, one entry takes as
long as 85 classes at 8192x4096x128256, and as 105 at 8192x1024x50304. Many tokens keep the entries of frequent classes.
If class ids are ordered by frequency, as tokenizers number them, a tenth of the blocks has half of the entries, and the
dense blocks have no variance. If the probabilities are nearly uniform, as before training, all blocks are dense. All
blocks are dense, too, if lists would save less time than making them takes.

kept_b is averaged over 128 valid tokens of the first chunk, and all chunks use the blocks that follow from it.

Making lists costs time even if the device then finds all blocks dense: 4.5 ms instead of 4.0 at 8192x1024x50304 and
2^-12. So if D, V and the threshold say that lists are unlikely to pay, the host launches an exact step in the first
place:

    lists, if USUAL_SHARE / threshold, the usual entries per token, < worth = (1 - LISTS_COST / D) V / CLASSES_PER_ENTRY

Lists by token become lists by class: a counting sort on the device, with the same result in every run.

    table    (B, V)    how many entries of each class each block of tokens has
                       then in how many places of the class's list the entries of earlier blocks stand
    behind   (V,)      where each class's list ends
    the block's next entry of class v goes to   behind_{v-1} + table_bv,   which grows by 1

A program for each block of tokens hands out the places, one token after another. So the entries of a class are in the
order of the tokens. A token has a class once, so the order of its own entries does not matter. Only the device knows
how many entries there are, so torch.sort would have to sort the whole buffer, its unused part included.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...meta.arguments import Backward, WithGrad
from ...support.sizes import cdiv
from ..gemm.tiles import LIVE, ClassBlocks, Matrix, load_tile
from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows
from .gather_sums import Lists, bounds, cut_lists

# n rows of the first chunk, V vocabulary, B blocks of LIVE classes, or of tokens

CLASSES_PER_ENTRY = 96
# LISTS_COST / D is the cost of making and sorting lists, relative to the GEMMs over all classes. To make the lists,
# kernels read V numbers per token; the GEMMs take 4 V D operations per token. Measured: 2.0 of 25 ms at
# 8192x4096x128256, 0.8 of 2.4 at 8192x1024x50304.
LISTS_COST = 320
# A token keeps at most 1 / threshold entries. USUAL_SHARE is the usual fraction of that number. Measured: 0.07 to 0.09
# with the hidden states of trained models (benchmarks/results/nvidia-h200/sparse.csv, entries_10 and entries_12). The
# fraction is nearly 1 if the probabilities are nearly uniform.
USUAL_SHARE = 1 / 8
DECIDING = tl.constexpr(128)  # tokens that decide, evenly spread over the chunk

NOTES = {"unbiased": "a sparse gradient, dense where its lists are long", "drop": "a sparse gradient"}
EXACT = "an exact gradient: so low a gradient_threshold takes longer at this D and V"

Call = WithGrad | Backward


class DenseClasses(NamedTuple):
    """Blocks of classes with a dense gradient. Without `number`, there are none."""

    is_dense: Tensor | None = None  # (B,) int32
    which: Tensor | None = None  # (B + 1,) int32, the dense blocks, ascending
    number: Tensor | None = None  # () int32

    @property
    def blocks(self) -> ClassBlocks:
        return ClassBlocks(self.number, self.which)


NONE_DENSE = DenseClasses()


class SparseRows(NamedTuple):
    """Rows of E, and what decides which entries of |p - onehot| are kept. Passed to kernels as one argument."""

    exponentials: Matrix  # (n, V), with the targets' entries in place
    row_sum: Tensor  # (n,)
    valid_tokens: ValidTokens
    dense: DenseClasses  # classes with a dense gradient, which are not listed
    V: int
    threshold: float
    seed: Tensor | None  # () int64; None: entries below the threshold are dropped

    @property
    def n(self) -> int:
        return self.exponentials.pointer.shape[0]


def empty_dense(num_classes: int, like: Tensor) -> DenseClasses:
    is_dense, index = like.new_empty(2, cdiv(num_classes, LIVE.value) + 1, dtype=torch.int32).unbind()
    return DenseClasses(is_dense[:-1], index, like.new_empty((), dtype=torch.int32))


def is_sparse(call: Call) -> bool:
    """Whether the step drops or samples entries. With "unbiased", the step is exact if making lists would take longer:
    an exact gradient is unbiased, too. "drop" always leaves entries out, as the user asked.
    """
    sparse, linear_weight = call.sparse, call.operands.linear_weight
    asked = any(sparse.products(call.output_mask))
    if not asked or sparse.gradient_mode != "unbiased":
        return asked
    return lists_may_pay(sparse.gradient_threshold, call.num_classes, linear_weight.shape[1])


def sparse_notes(call: Call) -> list[str]:
    if not any(call.sparse.products(call.output_mask)):
        return []
    return [NOTES[call.sparse.gradient_mode] if is_sparse(call) else EXACT]


def lists_may_pay(threshold: float, num_classes: int, hidden: int) -> bool:
    return USUAL_SHARE / threshold <= worth(num_classes, hidden)


def worth(num_classes: int, hidden: int) -> float:
    """The number of entries per token at which lists take as long as GEMMs over `num_classes` classes. Negative if D is
    small.
    """
    return (1.0 - LISTS_COST / hidden) * num_classes / CLASSES_PER_ENTRY


@Kernel
def kept_of_blocks_kernel(
    rows,  # SparseRows
    kept_ptr,  # (B,) float32, out
    n,
    ROWS: tl.constexpr,
):
    cols = tl.program_id(0) * LIVE + tl.arange(0, LIVE)
    count = valid_rows(rows.valid_tokens, n)
    seen = tl.minimum(count, DECIDING)
    total = tl.zeros((ROWS, LIVE), tl.float32)
    for start in range(0, seen, ROWS):
        place = start + tl.arange(0, ROWS)
        chosen = (place * count // tl.maximum(seen, 1)).to(tl.int64)
        scale = 1.0 / (rows.threshold * tl.load(rows.row_sum + chosen, mask=place < seen, other=1.0))
        mask = (place < seen)[:, None] & (cols < rows.V)[None, :]
        e = load_tile(rows.exponentials, chosen, cols, place < seen, cols < rows.V).to(tl.float32)
        share = tl.abs(e) * scale[:, None]
        total += tl.where(share < 1.0, share, tl.where(mask, 1.0, 0.0))
    tl.store(kept_ptr + tl.program_id(0), tl.sum(tl.sum(total, 1), 0) / tl.maximum(seen, 1))


@Kernel
def choose_dense_kernel(
    kept_ptr,  # (B,)
    dense,  # DenseClasses, out
    B,
    worth,  # entries a token whose lists take as long as the GEMMs of all blocks
    most,  # the most entries a token of a block that is not dense
    BLOCK: tl.constexpr,
):
    """One program."""
    cost = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        cost += tl.minimum(tl.load(kept_ptr + b, mask=b < B, other=0.0), most)
    most = tl.where(tl.sum(cost, 0) > worth, -1.0, most)
    count = 0
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        is_dense = (tl.load(kept_ptr + b, mask=b < B, other=-1.0) > most).to(tl.int32)
        tl.store(dense.is_dense + b, is_dense, mask=b < B)
        tl.store(dense.which + count + tl.cumsum(is_dense, 0) - 1, b, mask=is_dense > 0)
        count += tl.sum(is_dense, 0)
    tl.store(dense.number, count)


def launch_sparse_or_dense(rows: SparseRows, hidden: int) -> None:
    """Fills in `rows.dense`. The rows are those of the first chunk."""
    dense = rows.dense
    blocks = dense.is_dense.shape[0]
    kept_of_blocks = rows.row_sum.new_empty(blocks)
    kept_of_blocks_kernel[(blocks,)](rows, kept_of_blocks, rows.n, ROWS=32, num_warps=4)
    most = LIVE.value / CLASSES_PER_ENTRY
    at_most = worth(blocks * LIVE.value, hidden)
    choose_dense_kernel[(1,)](kept_of_blocks, dense, blocks, at_most, most, BLOCK=1024, num_warps=8)


BLOCK_B, BLOCK_V = tl.constexpr(32), tl.constexpr(64)
LISTED = tl.constexpr(256)  # entries that a program reads at a time


@Kernel
def count_kernel(
    lists,  # Lists, by token
    table_ptr,  # (B, V) int32, added to
    V,
    rows,  # tokens of a block
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(lists, row)
    for start in range(begin + tl.program_id(1) * LISTED, end, tl.num_programs(1) * LISTED):
        place = start + tl.arange(0, LISTED)
        column = tl.load(lists.entries + place, mask=place < end, other=0) & 0xFFFFFFFF
        tl.atomic_add(table_ptr + row // rows * V + column, 1, mask=place < end, sem="relaxed")


@Kernel
def running_totals_kernel(
    table_ptr,  # (B, V) int32, the counts; out: their sums over earlier blocks
    total_ptr,  # (V,) int32, out
    B,
    V,
):
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_V,), tl.int32)
    for start in range(0, B, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        places = table_ptr + block.to(tl.int64)[:, None] * V + v[None, :]
        mask = (block < B)[:, None] & (v < V)[None, :]
        count = tl.load(places, mask=mask, other=0)
        tl.store(places, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(total_ptr + v, total, mask=v < V)


@Kernel
def place_kernel(
    lists,  # Lists, by token
    order_ptr,  # (N,), the token of each of them; None if they are in the order of the tokens
    table_ptr,  # (B, V) int32, where in its class's list the block's next entry belongs
    classes,  # Lists by class; writes the entries
    N,
    V,
    rows,
):
    block = tl.program_id(0).to(tl.int64)
    for row in range(block * rows, tl.minimum((block + 1) * rows, N)):
        begin, end = bounds(lists, row)
        token = row
        if order_ptr is not None:
            token = tl.load(order_ptr + row).to(tl.int64)
        for start in range(begin, end, LISTED):
            place = start + tl.arange(0, LISTED)
            here = place < end
            entries = tl.load(lists.entries + place, mask=here, other=0)
            column, value = entries & 0xFFFFFFFF, entries >> 32 << 32
            to = tl.load(classes.behind + column - 1, mask=here & (column > 0), other=0)
            to += tl.atomic_add(table_ptr + block * V + column, 1, mask=here, sem="relaxed")
            tl.store(classes.entries + to, value | token, mask=here)
        tl.debug_barrier()  # the next token's places are behind this one's


def launch_class_order(
    lists: Lists,  # by token
    num_classes: int,
    *,
    rows: int,  # tokens of a block
    splits: int,  # the most splits
    order: Tensor | None = None,  # (N,)
) -> Lists:
    tokens, like = lists.lengths.shape[0], lists.entries
    blocks = cdiv(tokens, rows)
    table = like.new_zeros(blocks, num_classes, dtype=torch.int32)
    total, behind = (like.new_empty(num_classes, dtype=torch.int32) for _ in range(2))
    count_kernel[(tokens, lists.walkers)](lists, table, num_classes, rows, num_warps=4)
    running_totals_kernel[(cdiv(num_classes, BLOCK_V.value),)](table, total, blocks, num_classes, num_warps=4)
    classes = cut_lists(Lists(like.new_empty(like.numel(), dtype=torch.int64), total, behind=behind), splits)
    place_kernel[(blocks,)](lists, order, table, classes, tokens, num_classes, rows, num_warps=4)
    return classes
