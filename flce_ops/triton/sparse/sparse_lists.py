"""Lists the entries of a chunk's G that a sparse gradient keeps. flce_ops/math/sparse_gradient.py defines which these
are, and q.

          V, in tiles of TILE classes, groups of 16
          ┌────────┬────────┬────────┬──────┐         1. Reads all groups and adds up the q of each. The running sum
    row   │   .    │ .    . │        │  .   │            over groups tells which groups hold kept entries, a few
          └────────┴────────┴────────┴──────┘            per cent of them.
              ↓      ↓    ↓            ↓              2. Reads these groups again and finds the kept entries.
    list  │ class, value │ class, value │ ...

Each pass has one program for each row; the second pass has several if the list may be long. Pass 1 reads E from HBM
once, 32 bytes per thread. It computes one sum for each group. Pass 2 does what single entries need: their running sums
in 64 bits, their random numbers, and the comparison with the target. At each place of the list, pass 1 stores what pass
2 starts from: the group, the number of the kept entry within the group, and the running sum before the group.

The random numbers are those of `uniforms` in flce_ops/math/sparse_gradient.py: one for a token and tile. They depend
only on the seed, the token's place in the call and the tile's number. So forward and a checkpoint's second forward draw
the same numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math import sparse_gradient
from ..gemm.input_gradient import Finish
from ..gemm.tiles import LIVE
from ..kernel import Kernel
from ..rows.valid_tokens import valid_rows
from .gather_sums import Lists
from .sparse_or_dense import SparseRows

# n rows of a chunk, V vocabulary

GROUP = tl.constexpr(16)  # classes: a thread reads 32 bytes, in two loads
TILE = tl.constexpr(sparse_gradient.TILE)
ONE = tl.constexpr(sparse_gradient.ONE)
BITS = tl.constexpr(sparse_gradient.BITS)
GOLDEN = tl.constexpr(sparse_gradient.GOLDEN)


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
def key_of_row(rows, row):
    """The key of a row's random numbers in its first tile. Adding a tile's number, counted from the first tile, times
    GOLDEN gives that tile's key.
    """
    if rows.seed is None:
        return tl.zeros((), tl.uint32)
    else:
        token = tl.load(rows.valid_tokens.order + row).to(tl.int64)
        seed = tl.load(rows.seed).to(tl.int64)
        key = mix((token * GOLDEN).to(tl.uint32) ^ seed.to(tl.uint32))
        return mix(key ^ (seed >> 32).to(tl.uint32))


@triton.jit
def uniforms(rows, key, tile):
    """u in units of 1 / ONE, and the dither in [0, 1). u and the dither are 0 if there is no seed."""
    u = mix(key + tl.cast(tile, tl.uint32) * GOLDEN)
    dither = (mix(u ^ GOLDEN) >> 8).to(tl.float32) * 2.0**-24
    u = (u >> (32 - BITS)).to(tl.int64)
    if rows.seed is None:
        return tl.zeros_like(u), tl.zeros_like(dither)
    else:
        return u, dither


@triton.jit
def start_of_row(rows, row):
    """Returns a pointer to the row's exponentials, the threshold of an exponential, q of an exponential of 1, and the
    row's key.
    """
    limit = rows.threshold * tl.load(rows.row_sum + row)
    scale = tl.div_rn(ONE * 1.0, limit)
    exponentials = rows.exponentials.pointer + row.to(tl.int64) * rows.exponentials.stride
    return exponentials, limit, scale, key_of_row(rows, row)


@triton.jit
def shares(rows, e, scale, dither):
    """q in units of 1 / ONE. An entry at or above the threshold counts as 1, and so does nan."""
    q = tl.fma(tl.abs(e), scale, dither)
    if rows.seed is None:
        return tl.where(q < ONE, 0, ONE)
    else:
        return tl.where(q < ONE, q, ONE).to(tl.int32)


@triton.jit
def shares_of_tile(rows, e_ptr, scale, key, tile, EVEN_V: tl.constexpr):
    """Returns the groups of a tile, their sums of q in int64, and u.

    An aligned group lies either completely inside a dense block or completely outside. Rows of E are padded to 16
    bytes; the numbers after V count as 0.
    """
    V = rows.V
    u, dither = uniforms(rows, key, tile)
    group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    here = group * GROUP < V
    if rows.dense.number is not None:
        block = group // (LIVE // GROUP)
        here = here & (tl.load(rows.dense.is_dense + block, mask=here, other=1) == 0)
    WIDTH: tl.constexpr = 128 // e_ptr.dtype.element_ty.primitive_bitwidth
    q = tl.zeros(group.shape, tl.int32)
    for part in tl.static_range(GROUP // WIDTH):
        first = group * GROUP + part * WIDTH
        cols = first[:, None] + tl.arange(0, WIDTH)[None, :]
        e = tl.load(e_ptr + cols, mask=((first < V) & here)[:, None], other=0.0).to(tl.float32)
        if not EVEN_V:
            e = tl.where(cols < V, e, 0.0)
        q += tl.sum(shares(rows, e, scale, dither), 1)
    return group, tl.where(here, q, 0).to(tl.int64), u


@Kernel
def list_groups_kernel(
    rows,  # SparseRows
    lists,  # Lists, out: group, number within the group, sum before the group
    column_ptr,  # (n,) int64, the targets' columns
    of_dense_ptr,  # (n,) int64, out: the target's column if its class is dense, else -1
    EVEN_V: tl.constexpr,
):
    """Writes the length of each row's list, and for the m-th kept entry of a group what list_entries_kernel starts
    from:

    group << 32 | m << 26 | the tile's running sum before the group, modulo 1
    """
    row = tl.program_id(0)
    if row < valid_rows(rows.valid_tokens, tl.num_programs(0)):
        V = rows.V
        e_row, _, scale, key = start_of_row(rows, row)
        entries_row, room = lists.entries + row.to(tl.int64) * lists.room, lists.room
        count = 0
        tiles = tl.cdiv(V, TILE)
        if rows.dense.number is not None:
            tiles = tl.where(tl.load(rows.dense.number) < tl.cdiv(V, LIVE), tiles, 0)
        for tile in range(0, tiles):
            group, q, u = shares_of_tile(rows, e_row, scale, key, tile, EVEN_V)
            behind = tl.cumsum(q, 0) + u
            before = behind - q
            first = (before >> BITS).to(tl.int32)
            crossed = (behind >> BITS).to(tl.int32) - first
            where = count + first
            packed = (group.to(tl.int64) << 32) | (before & (ONE - 1))
            tl.store(entries_row + where, packed, mask=(crossed > 0) & (where < room))
            found = tl.sum(crossed + ((crossed > 1).to(tl.int32) << 16), 0)
            if found >> 16 > 0:  # a group with several kept entries: rare, except among frequent classes
                for m in range(1, GROUP):
                    at = where + m
                    tl.store(entries_row + at, packed | (m * ONE), mask=(crossed > m) & (at < room))
            count += found & 0xFFFF
        tl.store(lists.lengths + row, tl.minimum(count, room))
        if rows.dense.number is not None:
            column = tl.load(column_ptr + row)
            dense = tl.load(rows.dense.is_dense + column // LIVE, mask=column >= 0, other=0) > 0
            tl.store(of_dense_ptr + row, tl.where(dense, column, -1))
    else:
        tl.store(lists.lengths + row, 0)


@Kernel
def list_entries_kernel(
    rows,  # SparseRows
    lists,  # Lists: reads what list_groups_kernel wrote, writes the entries
    finish,  # Finish
    BLOCK: tl.constexpr,
):
    """The m-th kept entry of a group is the first one after which the tile's running sum has passed m + 1 whole
    numbers.
    """
    row = tl.program_id(0)
    e_row, limit, scale, key = start_of_row(rows, row)
    row_factor, residual = tl.load(finish.row_factor + row), tl.load(finish.residual + row)
    column = tl.load(finish.column + row).to(tl.int32)
    count = tl.load(lists.lengths + row)
    entries_row = lists.entries + row.to(tl.int64) * lists.room
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        packed = tl.load(entries_row + at, mask=at < count, other=0)
        group = (packed >> 32).to(tl.int32)
        _, dither = uniforms(rows, key, group // (TILE // GROUP))  # entries of one block belong to different tiles
        cols = (group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        e = tl.load(e_row + cols, mask=(at < count)[:, None] & (cols < rows.V), other=0.0).to(tl.float32)
        behind = tl.cumsum(shares(rows, e, scale, dither[:, None]).to(tl.int64), 1)
        goal = ((packed >> BITS & (GROUP - 1)) + 1) << BITS
        earlier = (behind + (packed & (ONE - 1))[:, None] < goal[:, None]).to(tl.int32)
        place = tl.minimum(tl.sum(earlier, 1), GROUP - 1)
        e = tl.sum(tl.where(tl.arange(0, GROUP)[None, :] == place[:, None], e, 0.0), 1)
        found = group * GROUP + place
        below = tl.abs(e) < limit
        value = row_factor * tl.where(below, tl.where(e < 0.0, -limit, limit), e)
        value += tl.where((found == column) & (below == 0), residual, 0.0)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(entries_row + at, (bits << 32) | found.to(tl.int64), mask=at < count)


def launch_lists(
    rows: SparseRows,
    finish: Finish,
    lists: Lists,  # the lists of the chunk; out
) -> Tensor:  # (n,)
    """The target's column if its class is dense, else -1."""
    n, of_dense = rows.n, torch.empty_like(finish.column)
    list_groups_kernel[(n,)](rows, lists, finish.column, of_dense, EVEN_V=rows.V % 8 == 0, num_warps=4)
    list_entries_kernel[(n, lists.walkers)](rows, lists, finish, BLOCK=128, num_warps=4)
    return of_dense
