"""Adds up numbers that epilogues store for each row and tile of the vocabulary: (T, n) becomes (n,).

In memory the tiles' numbers are (T, n'), where n' is n rounded up to a multiple of 16.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, row_distance, valid_rows

# n rows of a chunk, T tiles along the vocabulary, s sums of each row

# A program reads the sums of all tiles for 16 rows in a few large loads, because most of these sums have left the L2
# cache. This takes 7 us at 1024 rows and 256000 classes. Blocks of 32 x 32 take 21 us.
BLOCK_N, BLOCK_T = tl.constexpr(16), tl.constexpr(512)


@triton.jit
def sum_of_tiles(partial_ptr, rows, count, n, T, BLOCK: tl.constexpr):  # (T, n) -> sums of these rows, which follow
    """The sums over all tiles; 0 for rows from `count` on."""
    acc = tl.zeros((BLOCK, rows.shape[0]), tl.float32)
    for start in range(0, tl.where(tl.min(rows, 0) < count, T, 0), BLOCK):
        t = start + tl.arange(0, BLOCK)
        places = partial_ptr + t.to(tl.int64)[:, None] * row_distance(n) + rows[None, :]
        acc += tl.load(places, mask=(t[:, None] < T) & (rows[None, :] < count), other=0.0)
    return tl.sum(acc, 0)


@Kernel
def sum_tiles_kernel(
    partial_ptr,  # (s, T, n)
    row_sum_ptr,  # (s, n) out
    valid_tokens,  # ValidTokens
    n,
    T,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    which = tl.program_id(1).to(tl.int64)
    count = valid_rows(valid_tokens, n)
    total = sum_of_tiles(partial_ptr + which * T * row_distance(n), rows, count, n, T, BLOCK_T)
    tl.store(row_sum_ptr + which * n + rows, total, mask=rows < count)


def launch_sum_tiles(
    partial: Tensor,  # (T, n'), or (s, T, n')
    row_sum: Tensor,  # (n,), or (s, n); out
    valid_tokens: ValidTokens,
) -> None:
    tiles, n = partial.shape[-2], row_sum.shape[-1]
    grid = (cdiv(n, BLOCK_N.value), 1 if partial.dim() == 2 else partial.shape[0])
    sum_tiles_kernel[grid](partial, row_sum, valid_tokens, n, tiles, num_warps=8)


@Kernel
def max_and_sum_kernel(
    partial_max_ptr,  # (T, n) base 2
    partial_ptr,  # (T, n)
    out_ptr,  # (n,) out: max_t partial_max_t
    log_sum_ptr,  # (n,) out: log2 sum_t partial_t exp2(partial_max_t - that maximum)
    valid_tokens,  # ValidTokens
    n,
    T,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = valid_rows(valid_tokens, n)
    end = tl.where(tl.program_id(0) * BLOCK_N < count, T, 0)
    running_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    running_sum = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        offsets = t[:, None].to(tl.int64) * row_distance(n) + rows[None, :]
        mask = (t[:, None] < end) & (rows[None, :] < count)
        tile_max = tl.load(partial_max_ptr + offsets, mask=mask, other=float("-inf"))
        tile_sum = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
        new_max = tl.maximum(running_max, tl.max(tile_max, 0))
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp2(running_max - finite) + tl.sum(
            tile_sum * tl.exp2(tile_max - finite[None, :]), 0
        )
        running_max = new_max
    # a rank whose classes are all at -inf gets probabilities of 0, not nan
    running_max = tl.where(running_max == float("-inf"), 0.0, running_max)
    tl.store(out_ptr + rows, running_max, mask=rows < count)
    tl.store(log_sum_ptr + rows, tl.log2(running_sum), mask=rows < count)


def launch_max_and_sum(
    partial_max: Tensor,  # (T, n')
    partial: Tensor,  # (T, n')
    out: Tensor,  # (n,), as is log_sum
    log_sum: Tensor,
    valid_tokens: ValidTokens,
) -> None:
    tiles, n = partial.shape[0], out.shape[0]
    grid = (cdiv(n, BLOCK_N.value),)
    max_and_sum_kernel[grid](partial_max, partial, out, log_sum, valid_tokens, n, tiles, num_warps=8)
