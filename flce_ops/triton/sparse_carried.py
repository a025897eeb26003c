"""What ranks that share the vocabulary tell each other of a tile of classes that they share (sparse_lists.py).

    rank r      ...  ──tile──┐┌──tile── | last_r          the sum of q over its classes of its last tile
    rank r + 1                            | ──tile──┐┌──  carried = sum of last_r of the ranks before, in this tile

One number a row; with it a tile's running sum goes on where the rank before has left it, as on one device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math import sparse_gradient
from flce_ops.math.sparse_gradient import Shard, SparseGradient
from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.replay import Kernel
from flce_ops.triton.sparse_draws import ONE, key_of_row, uniforms
from flce_ops.triton.sparse_lists import group_shares, groups_of_tile
from flce_ops.triton.sparse_or_dense import DenseClasses

# n rows of a chunk, V vocabulary (of this rank)


@Kernel
@triton.jit
def last_shares_kernel(
    e_ptr,  # (n, V), with the target's entries
    row_sum_ptr,  # (n,)
    dense,  # DenseClasses
    seed_ptr,  # () int64
    shares_ptr,  # (n,) int64, out
    kept,  # Kept
    V,
    stride_e,
    threshold,
    first_tile,
    EVEN_V: tl.constexpr,
    BEFORE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0)
    total = tl.zeros((), tl.int64)
    if row < kept_rows(kept, tl.num_programs(0)):
        scale = tl.div_rn(ONE * 1.0, threshold * tl.load(row_sum_ptr + row))
        key = key_of_row(seed_ptr, tl.load(kept.order + row).to(tl.int64), first_tile)
        tile = tl.cdiv(V + BEFORE, TILE) - 1
        group, here = groups_of_tile(tile, dense, V, BEFORE, TILE)
        _, dither = uniforms(key, tile)
        e_row = e_ptr + row.to(tl.int64) * stride_e
        q = group_shares(e_row, group, here, scale, dither, dense, V, True, EVEN_V, BEFORE)
        total = tl.sum(q.to(tl.int64), 0)
    tl.store(shares_ptr + row, total)


def launch_carried(
    exponentials: Tensor,  # (n, V), with the target's entries
    row_sum: Tensor,  # (n,), of whole rows
    kept: Kept,
    sparse: SparseGradient,
    dense: DenseClasses,
    shard: Shard,
) -> Tensor:  # (n,) int64
    n, num_classes = exponentials.shape
    shares = torch.empty(n, dtype=torch.int64, device=exponentials.device)
    first_tile, before = divmod(shard.start, sparse_gradient.TILE)
    last_shares_kernel[(n,)](
        exponentials,
        row_sum,
        dense,
        sparse.gradient_seed,
        shares,
        kept,
        num_classes,
        exponentials.stride(0),
        sparse.gradient_threshold,
        first_tile,
        EVEN_V=num_classes % 8 == 0,
        BEFORE=before,
        TILE=sparse_gradient.TILE,
        num_warps=4,
    )
    return shard.shares_before(shares)
