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

Ranks that share the vocabulary tell each other of a tile that they share, one number a row; with it a tile's running
sum goes on where the rank before has left it, as on one device:

    rank r      ...  ──tile──┐┌──tile── | last_r          the sum of q over its classes of its last tile
    rank r + 1                            | ──tile──┐┌──  carried = sum of last_r of the ranks before, in this tile

The random numbers are those of `uniforms` in flce_ops/math/sparse_gradient.py: one for a token and tile, of the seed,
the token's place in the call and the tile's number alone, so that forward, a checkpoint's second forward and every rank
draw the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math import sparse_gradient
from ...math.sparse_gradient import Shard, SparseGradient
from ..launch.replay import Kernel
from ..rows.finish_rows import FinishedRows
from ..rows.valid_tokens import valid_rows
from .live_tiles import LIVE, ComparedRows
from .sparse_or_dense import DenseClasses

# n rows of a chunk, V vocabulary (of this rank), R room of a row's list

GROUP = tl.constexpr(16)  # classes: a thread reads 32 bytes, 16 at once
TILE = tl.constexpr(sparse_gradient.TILE)
ONE = tl.constexpr(sparse_gradient.ONE)
BITS = tl.constexpr(sparse_gradient.BITS)
GOLDEN = tl.constexpr(sparse_gradient.GOLDEN)
ENTRIES_OF_WALKER = 1024


class Lists(NamedTuple):
    """Of the valid tokens, in their order; one argument of a kernel."""

    entries: Tensor  # (N, R) int64: a float32 value above its class
    lengths: Tensor  # (N,) int32

    @property
    def walkers(self) -> int:
        """Programs for a list, which a few tokens fill: 4,000 entries of a trained model at 2^-12, 200 in the mean."""
        return max(self.entries.shape[1] // ENTRIES_OF_WALKER, 1)

    def of(self, rows: slice) -> "Lists":
        return Lists(self.entries[rows], self.lengths[rows])


class DrawnRows(NamedTuple):
    """Rows, and what they are drawn by; one argument of a kernel."""

    compared: ComparedRows
    dense: DenseClasses  # those have no entries here
    seed: Tensor | None  # () int64; None where what is below the threshold is dropped


@triton.jit
def mix(x):
    """`mix` of flce_ops/math/sparse_gradient.py, in uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


@triton.jit
def key_of_row(rows, row, first_tile):
    """To which a tile's number behind the first one adds its multiple of GOLDEN."""
    if rows.seed is None:
        return tl.zeros((), tl.uint32)
    else:
        token = tl.load(rows.compared.valid_tokens.order + row).to(tl.int64)
        seed = tl.load(rows.seed).to(tl.int64)
        key = mix((token * GOLDEN).to(tl.uint32) ^ seed.to(tl.uint32))
        return mix(key ^ (seed >> 32).to(tl.uint32)) + tl.full((), first_tile, tl.uint32) * GOLDEN


@triton.jit
def uniforms(rows, key, tile):
    """u in units of 1 / ONE, and the dither in [0, 1); 0 where nothing is drawn."""
    u = mix(key + tl.cast(tile, tl.uint32) * GOLDEN)
    dither = (mix(u ^ GOLDEN) >> 8).to(tl.float32) * 2.0**-24
    u = (u >> (32 - BITS)).to(tl.int64)
    if rows.seed is None:
        return tl.zeros_like(u), tl.zeros_like(dither)
    else:
        return u, dither


@triton.jit
def start_of_row(rows, row, first_tile):
    """Its exponentials, the threshold of one, q of an exponential of 1, the key of its random numbers."""
    compared = rows.compared
    limit = compared.threshold * tl.load(compared.row_sum + row)
    scale = tl.div_rn(ONE * 1.0, limit)
    exponentials = compared.exponentials.pointer + row.to(tl.int64) * compared.exponentials.stride
    return exponentials, limit, scale, key_of_row(rows, row, first_tile)


@triton.jit
def shares(rows, e, scale, dither):
    """q in units of 1 / ONE; an entry that is not below the threshold counts as one, and so does nan."""
    q = tl.fma(tl.abs(e), scale, dither)
    if rows.seed is None:
        return tl.where(q < ONE, 0, ONE)
    else:
        return tl.where(q < ONE, q, ONE).to(tl.int32)


@triton.jit
def columns_of_groups(rows, first, WIDTH: tl.constexpr, BEFORE: tl.constexpr):
    """(groups, WIDTH), and which are listed: of groups that are not aligned, those here and of no dense class."""
    cols = first[:, None] - BEFORE + tl.arange(0, WIDTH)[None, :]
    listed = cols < rows.compared.V
    if BEFORE // GROUP * GROUP != BEFORE:
        listed = listed & (cols >= 0)
        if rows.dense.number is not None:
            listed = listed & (tl.load(rows.dense.is_dense + cols // LIVE, mask=listed, other=1) == 0)
    return cols, listed


@triton.jit
def shares_of_tile(rows, e_ptr, scale, key, tile, EVEN_V: tl.constexpr, BEFORE: tl.constexpr):
    """Its groups, their sums of q in int64, and u.

    Groups that are aligned are dense or not as a whole. Rows of E are whole times 16 bytes; what stands behind V there
    counts as 0.
    """
    V = rows.compared.V
    u, dither = uniforms(rows, key, tile)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    here = (group * GROUP < V + BEFORE) & (group * GROUP + GROUP > BEFORE)
    if rows.dense.number is not None and BEFORE // GROUP * GROUP == BEFORE:
        block = (group - BEFORE // GROUP) // (LIVE // GROUP)
        here = here & (tl.load(rows.dense.is_dense + block, mask=here, other=1) == 0)
    WIDTH: tl.constexpr = 128 // e_ptr.dtype.element_ty.primitive_bitwidth
    q = tl.zeros(group.shape, tl.int32)
    for part in tl.static_range(GROUP // WIDTH):
        first = group * GROUP + part * WIDTH
        cols, mask = columns_of_groups(rows, first, WIDTH, BEFORE)
        if BEFORE // GROUP * GROUP == BEFORE:
            mask = (first - BEFORE < V)[:, None]
        e = tl.load(e_ptr + cols, mask=mask & here[:, None], other=0.0).to(tl.float32)
        if not EVEN_V:
            e = tl.where(cols < V, e, 0.0)
        q += tl.sum(shares(rows, e, scale, dither), 1)
    return group, tl.where(here, q, 0).to(tl.int64), u


@Kernel
def last_shares_kernel(
    rows,  # DrawnRows
    shares_ptr,  # (n,) int64, out
    first_tile,
    EVEN_V: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """One program a row: the sum of q over its last tile."""
    row = tl.program_id(0)
    total = tl.zeros((), tl.int64)
    if row < valid_rows(rows.compared.valid_tokens, tl.num_programs(0)):
        e_row, _, scale, key = start_of_row(rows, row, first_tile)
        tile = tl.cdiv(rows.compared.V + BEFORE, TILE) - 1
        _, q, _ = shares_of_tile(rows, e_row, scale, key, tile, EVEN_V, BEFORE)
        total = tl.sum(q, 0)
    tl.store(shares_ptr + row, total)


@Kernel
def list_groups_kernel(
    rows,  # DrawnRows
    lists,  # Lists, out: group, number, sum before it
    column_ptr,  # (n,) int64, the target's
    of_dense_ptr,  # (n,) int64, out: the column, -1 where its class is not dense
    carried_ptr,  # (n,) int64, the sum of q that other ranks have of the first tile, modulo 1; None for 0
    R,
    first_tile,
    EVEN_V: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """The length of a row's list. In it, for the m-th kept entry of a group, what list_entries_kernel starts from:

    group << 32 | m << 26 | sum of the tile before the group, modulo 1
    """
    row = tl.program_id(0)
    if row < valid_rows(rows.compared.valid_tokens, tl.num_programs(0)):
        V = rows.compared.V
        e_row, _, scale, key = start_of_row(rows, row, first_tile)
        entries_row = lists.entries + row.to(tl.int64) * R
        count = 0
        tiles = tl.cdiv(V + BEFORE, TILE)
        if rows.dense.number is not None:
            tiles = tl.where(tl.load(rows.dense.number) < tl.cdiv(V, LIVE), tiles, 0)
        for tile in range(0, tiles):
            group, q, u = shares_of_tile(rows, e_row, scale, key, tile, EVEN_V, BEFORE)
            if carried_ptr is not None:
                u = (u + tl.load(carried_ptr + row, mask=tile == 0, other=0)) & (ONE - 1)
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
        tl.store(lists.lengths + row, tl.minimum(count, R))
        if rows.dense.number is not None:
            column = tl.load(column_ptr + row)
            dense = tl.load(rows.dense.is_dense + column // LIVE, mask=column >= 0, other=0) > 0
            tl.store(of_dense_ptr + row, tl.where(dense, column, -1))
    else:
        tl.store(lists.lengths + row, 0)


@Kernel
def list_entries_kernel(
    rows,  # DrawnRows
    lists,  # Lists, what list_groups_kernel left; out
    column_ptr,  # (n,) int64, the target's
    finished,  # FinishedRows
    R,
    first_tile,
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The m-th kept entry of a group is the first behind which the tile's sum has passed m + 1 whole numbers."""
    row = tl.program_id(0)
    e_row, limit, scale, key = start_of_row(rows, row, first_tile)
    row_factor, residual = tl.load(finished.row_factor + row), tl.load(finished.residual + row)
    column = tl.load(column_ptr + row).to(tl.int32)
    count = tl.load(lists.lengths + row)
    entries_row = lists.entries + row.to(tl.int64) * R
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        packed = tl.load(entries_row + at, mask=at < count, other=0)
        group = (packed >> 32).to(tl.int32)
        _, dither = uniforms(rows, key, group // (TILE // GROUP))  # tiles differ from entry to entry
        cols, listed = columns_of_groups(rows, group * GROUP, GROUP, BEFORE)
        e = tl.load(e_row + cols, mask=(at < count)[:, None] & listed, other=0.0).to(tl.float32)
        behind = tl.cumsum(shares(rows, e, scale, dither[:, None]).to(tl.int64), 1)
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


def drawn_rows(compared: ComparedRows, sparse: SparseGradient, dense: DenseClasses) -> DrawnRows:
    return DrawnRows(compared, dense, sparse.gradient_seed if sparse.gradient_mode == "unbiased" else None)


def launch_carried(rows: DrawnRows, shard: Shard) -> Tensor:
    """(n,) int64, for launch_lists. The row sums are of whole rows."""
    compared, (first_tile, before) = rows.compared, divmod(shard.start, sparse_gradient.TILE)
    last = compared.row_sum.new_empty(compared.n, dtype=torch.int64)
    last_shares_kernel[(compared.n,)](rows, last, first_tile, EVEN_V=compared.V % 8 == 0, BEFORE=before, num_warps=4)
    return shard.shares_before(last)


def launch_lists(
    rows: DrawnRows,
    finished: FinishedRows,
    column: Tensor,  # (n,)
    lists: Lists,  # of the chunk; out
    vocab_start: int = 0,  # of this rank
    carried: Tensor | None = None,  # (n,)
) -> Tensor:  # (n,)
    """The target's column where its class is dense, -1 elsewhere."""
    n, room, of_dense = rows.compared.n, lists.entries.shape[1], column.new_empty(column.shape)
    first_tile, before = divmod(vocab_start, sparse_gradient.TILE)
    even = rows.compared.V % 8 == 0
    list_groups_kernel[(n,)](
        rows, lists, column, of_dense, carried, room, first_tile, EVEN_V=even, BEFORE=before, num_warps=4
    )
    list_entries_kernel[(n, lists.walkers)](
        rows, lists, column, finished, room, first_tile, BEFORE=before, BLOCK=128, num_warps=4
    )
    return of_dense
