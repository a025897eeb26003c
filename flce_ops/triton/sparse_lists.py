"""Lists of the entries of G that a sparse gradient keeps (flce_ops/math/sparse_gradient.py), of a chunk of E.

              V, in tiles of TILE classes, groups of 16
          ┌────────┬────────┬────────┬──────┐                  1. a group's q are added up as it is read; the running
    row   │   .    │ .    . │        │  .   │                     sum of groups says which of them hold kept entries,
          └────────┴────────┴────────┴──────┘                     some per cent
              ↓      ↓    ↓            ↓                       2. those groups are read again, and the entry found
    list  │ class, value │ class, value │ ...

One program a row for each, or a few where its list has much room. E is read once from memory: 32 bytes a thread, no
random number, comparison with the target or 64-bit sum for an entry, only for a group. The first pass leaves in a place
of the list what the second one starts from: the group, which of its kept entries this is, and the running sum before
the group.

Tiles and groups are of the classes of all ranks that share the vocabulary: a rank's column c stands in place
BEFORE + c of its first tile and those after. Where that is no multiple of 16, groups are not on 16 bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math import sparse_gradient
from flce_ops.math.sparse_gradient import SparseGradient
from flce_ops.triton.finish_rows import FinishedRows
from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.live_tiles import LIVE
from flce_ops.triton.replay import Kernel
from flce_ops.triton.sparse_draws import BITS, GOLDEN, ONE, key_of_row, mix, uniforms
from flce_ops.triton.sparse_or_dense import NONE_DENSE, DenseClasses

# n rows of a chunk, V vocabulary, R room of a row's list

GROUP = tl.constexpr(16)  # classes: a thread reads 32 bytes, 16 at once
WARPS = 4
ENTRIES_OF_WALKER = 1024


class Lists(NamedTuple):
    """Of the kept tokens, in their order."""

    entries: Tensor  # (N, R) int64: a float32 value above its class
    lengths: Tensor  # (N,) int32

    @property
    def walkers(self) -> int:
        """Programs for a list, which a few tokens fill: 4,000 entries of a trained model at 2^-12, 200 in the mean."""
        return max(self.entries.shape[1] // ENTRIES_OF_WALKER, 1)

    def of(self, rows: slice) -> "Lists":
        return Lists(self.entries[rows], self.lengths[rows])


class SparseRows(NamedTuple):
    """What lists are made of beside E, (n,) each."""

    row_sum: Tensor  # Z
    row_factor: Tensor  # c
    column: Tensor  # int64, the target's
    residual: Tensor  # c times what rounding took from the target's entry
    dense: DenseClasses  # those have no entries here
    lengths: Tensor  # int32, out
    column_of_dense: Tensor  # int64, out: `column`, -1 where its class is not dense
    carried: Tensor | None = None  # int64, the sum of q that other ranks have of the first tile, modulo 1


@triton.jit
def shares(e, scale, dither, UNBIASED: tl.constexpr):
    """q in units of 1 / ONE; an entry that is not below the threshold counts as one, and so does nan."""
    q = tl.fma(tl.abs(e), scale, dither)
    if UNBIASED:
        return tl.where(q < ONE, q, ONE).to(tl.int32)
    else:
        return tl.where(q < ONE, 0, ONE)


@triton.jit
def is_listed(cols, dense, V):
    """Of columns of groups that are not aligned: here, and of no dense class."""
    listed = (cols >= 0) & (cols < V)
    if dense.number is not None:
        listed = listed & (tl.load(dense.is_dense + cols // LIVE, mask=listed, other=1) == 0)
    return listed


@triton.jit
def groups_of_tile(tile, dense, V, BEFORE: tl.constexpr, TILE: tl.constexpr):
    """The groups, and which of them are here. Those that are aligned are dense or not as a whole."""
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    here = (group * GROUP < V + BEFORE) & (group * GROUP + GROUP > BEFORE)
    if dense.number is not None and BEFORE // GROUP * GROUP == BEFORE:
        block = (group - BEFORE // GROUP) // (LIVE // GROUP)
        here = here & (tl.load(dense.is_dense + block, mask=here, other=1) == 0)
    return group, here


@triton.jit
def group_shares(
    e_ptr, group, here, scale, dither, dense, V, UNBIASED: tl.constexpr, EVEN_V: tl.constexpr, BEFORE: tl.constexpr
):
    """Sums of q, (groups,) int32. Rows of E are whole times 16 bytes; what stands behind V there counts as 0."""
    WIDTH: tl.constexpr = 128 // e_ptr.dtype.element_ty.primitive_bitwidth
    q = tl.zeros(group.shape, tl.int32)
    for part in tl.static_range(GROUP // WIDTH):
        first = group * GROUP + part * WIDTH - BEFORE
        cols = first[:, None] + tl.arange(0, WIDTH)[None, :]
        mask = ((first < V) & here)[:, None]
        if BEFORE // GROUP * GROUP != BEFORE:
            mask = is_listed(cols, dense, V) & here[:, None]
        e = tl.load(e_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if not EVEN_V:
            e = tl.where(cols < V, e, 0.0)
        q += tl.sum(shares(e, scale, dither, UNBIASED), 1)
    return tl.where(here, q, 0)


@Kernel
@triton.jit
def list_groups_kernel(
    e_ptr,  # (n, V)
    rows,  # SparseRows
    seed_ptr,  # () int64, read where UNBIASED
    entries_ptr,  # (n, R) out: group, number, sum before it
    kept,  # Kept
    V,
    stride_e,
    R,
    threshold,
    first_tile,
    UNBIASED: tl.constexpr,
    EVEN_V: tl.constexpr,
    BEFORE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The length of a row's list. In it, for the m-th kept entry of a group, what list_entries_kernel starts from:

    group << 32 | m << 26 | sum of the tile before the group, modulo 1
    """
    row = tl.program_id(0)
    if row < kept_rows(kept, tl.num_programs(0)):
        scale = tl.div_rn(ONE * 1.0, threshold * tl.load(rows.row_sum + row))
        key = tl.zeros((), tl.uint32)
        if UNBIASED:
            key = key_of_row(seed_ptr, tl.load(kept.order + row).to(tl.int64), first_tile)
        e_row = e_ptr + row.to(tl.int64) * stride_e
        entries_row = entries_ptr + row.to(tl.int64) * R
        count = 0
        tiles = tl.cdiv(V + BEFORE, TILE)
        if rows.dense.number is not None:
            tiles = tl.where(tl.load(rows.dense.number) < tl.cdiv(V, LIVE), tiles, 0)
        for tile in range(0, tiles):
            group, here = groups_of_tile(tile, rows.dense, V, BEFORE, TILE)
            u, dither = tl.zeros((), tl.int64), 0.0
            if UNBIASED:
                u, dither = uniforms(key, tile)
                if rows.carried is not None:
                    u = (u + tl.load(rows.carried + row, mask=tile == 0, other=0)) & (ONE - 1)
            q = group_shares(e_row, group, here, scale, dither, rows.dense, V, UNBIASED, EVEN_V, BEFORE).to(tl.int64)
            behind = tl.cumsum(q, 0) + u
            before = behind - q
            first = (before >> BITS).to(tl.int32)
            crossed = (behind >> BITS).to(tl.int32) - first
            where = count + first
            packed = (group.to(tl.int64) << 32) | (before & (ONE - 1))
            tl.store(entries_row + where, packed, mask=(crossed > 0) & (where < R))
            found = tl.sum(crossed + ((crossed > 1).to(tl.int32) << 16), 0)
            if found >> 16 > 0:  # a group with several: rare but in front of a frequent class
                for m in range(1, GROUP):
                    at = where + m
                    tl.store(entries_row + at, packed | (m * ONE), mask=(crossed > m) & (at < R))
            count += found & 0xFFFF
        tl.store(rows.lengths + row, tl.minimum(count, R))
        if rows.dense.number is not None:
            column = tl.load(rows.column + row)
            dense = tl.load(rows.dense.is_dense + column // LIVE, mask=column >= 0, other=0) > 0
            tl.store(rows.column_of_dense + row, tl.where(dense, column, -1))
    else:
        tl.store(rows.lengths + row, 0)


@Kernel
@triton.jit
def list_entries_kernel(
    e_ptr,  # (n, V)
    rows,  # SparseRows
    seed_ptr,  # () int64, read where UNBIASED
    entries_ptr,  # (n, R), what list_groups_kernel left; out
    kept,  # Kept
    V,
    stride_e,
    R,
    threshold,
    first_tile,
    UNBIASED: tl.constexpr,
    BEFORE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The m-th kept entry of a group is the first behind which the tile's sum has passed m + 1 whole numbers."""
    row = tl.program_id(0)
    row_sum, row_factor = tl.load(rows.row_sum + row), tl.load(rows.row_factor + row)
    column = tl.load(rows.column + row).to(tl.int32)
    residual = tl.load(rows.residual + row)
    limit = threshold * row_sum
    scale = tl.div_rn(ONE * 1.0, limit)
    count = tl.load(rows.lengths + row)
    key = tl.zeros((), tl.uint32)
    if UNBIASED:
        key = key_of_row(seed_ptr, tl.load(kept.order + row).to(tl.int64), first_tile)
    e_row = e_ptr + row.to(tl.int64) * stride_e
    entries_row = entries_ptr + row.to(tl.int64) * R
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        packed = tl.load(entries_row + at, mask=at < count, other=0)
        group = (packed >> 32).to(tl.int32)
        # of tiles that differ from entry to entry
        tile = group // (TILE // GROUP)
        dither = tl.zeros((BLOCK,), tl.float32)
        if UNBIASED:
            u = mix(key + tile.to(tl.uint32) * GOLDEN)
            dither = (mix(u ^ GOLDEN) >> 8).to(tl.float32) * 2.0**-24
        cols = group[:, None] * GROUP - BEFORE + tl.arange(0, GROUP)[None, :]
        listed = cols < V
        if BEFORE // GROUP * GROUP != BEFORE:
            listed = is_listed(cols, rows.dense, V)
        e = tl.load(e_row + cols, mask=(at < count)[:, None] & listed, other=0.0).to(tl.float32)
        behind = tl.cumsum(shares(e, scale, dither[:, None], UNBIASED).to(tl.int64), 1)
        goal = ((packed >> BITS & (GROUP - 1)) + 1) << BITS
        earlier = (behind + (packed & (ONE - 1))[:, None] < goal[:, None]).to(tl.int32)
        place = tl.minimum(tl.sum(earlier, 1), GROUP - 1)
        e = tl.sum(tl.where(tl.arange(0, GROUP)[None, :] == place[:, None], e, 0.0), 1)
        found = group * GROUP - BEFORE + place
        below = tl.abs(e) < limit
        value = row_factor * tl.where(below, tl.where(e < 0.0, -limit, limit), e)
        value += tl.where((found == column) & (below == 0), residual, 0.0)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(entries_row + at, (bits << 32) | found.to(tl.int64), mask=at < count)


def launch_lists(
    exponentials: Tensor,  # (n, V), with the target's entries
    row_sum: Tensor,  # (n,)
    finished: FinishedRows,
    column: Tensor,  # (n,)
    kept: Kept,
    sparse: SparseGradient,
    lists: Lists,  # of the chunk; out
    dense: DenseClasses = NONE_DENSE,
    vocab_start: int = 0,  # of this rank
    carried: Tensor | None = None,  # (n,)
) -> Tensor:  # (n,)
    """The target's column where its class is dense, -1 elsewhere."""
    assert exponentials.stride(1) == 1 and lists.entries.stride(1) == 1
    n, num_classes = exponentials.shape
    of_dense = torch.empty_like(column)
    first_tile, before = divmod(vocab_start, sparse_gradient.TILE)
    rows = SparseRows(row_sum, finished.row_factor, column, finished.residual, dense, lists.lengths, of_dense, carried)
    args = (
        exponentials,
        rows,
        sparse.gradient_seed,
        lists.entries,
        kept,
        num_classes,
        exponentials.stride(0),
        lists.entries.stride(0),
        sparse.gradient_threshold,
        first_tile,
    )
    options = {"UNBIASED": sparse.gradient_mode == "unbiased", "BEFORE": before, "TILE": sparse_gradient.TILE}
    list_groups_kernel[(n,)](*args, **options, EVEN_V=num_classes % 8 == 0, num_warps=WARPS)
    list_entries_kernel[(n, lists.walkers)](*args, **options, BLOCK=128, num_warps=4)
    return of_dense
