"""Adds up numbers that epilogues store for each row and tile of the vocabulary: (T, n) becomes (n,).

In memory the tiles' numbers are (T, n'), where n' is n rounded up to a multiple of 16.
"""

import triton.language as tl
from torch import Tensor

from ...support.integers import cdiv
from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, row_distance, valid_rows
from .logits_gemm import LARGEST_SUM, exceeds

# n rows of a chunk, T tiles along the vocabulary, s sums of each row

# A program reads the sums of all tiles for 16 rows in one or two large loads, because most of these sums have left the
# L2 cache. This takes 7 us at 1024 rows and 256000 classes. Blocks of 32 x 32 take 21 us.
BLOCKS = {"BLOCK_N": 16, "BLOCK_T": 512, "num_warps": 8}


@Kernel
def sum_tiles_kernel(
    partial_ptr,  # (s, T, n)
    row_sum_ptr,  # (s, n) out
    guard_ptr,  # () int32: bits of the largest row sum, written; with GUARDED, read; or None
    valid_tokens,  # ValidTokens
    n,
    T,
    GUARDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    which = tl.program_id(1)
    count = valid_rows(valid_tokens, n)
    end = tl.where(tl.program_id(0) * BLOCK_N < count, T, 0)
    if GUARDED:
        end = tl.where(exceeds(guard_ptr), end, 0)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        mask = (t[:, None] < T) & (rows[None, :] < count)
        acc += tl.load(
            partial_ptr + (which * T + t).to(tl.int64)[:, None] * row_distance(n) + rows[None, :], mask=mask, other=0.0
        )
    total = tl.sum(acc, 0)
    # `(rows < n) & (end > 0)` would be a mask of integers, because of its scalar, and Triton 3.9's interpreter refuses
    # that
    tl.store(row_sum_ptr + which * n + rows, total, mask=rows < tl.where(end > 0, count, 0))
    if not GUARDED and guard_ptr is not None:
        bits = total.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(guard_ptr, tl.max(tl.where(rows < count, bits, 0), 0))


def launch_sum_tiles(
    partial: Tensor,  # (T, n'), or (s, T, n')
    row_sum: Tensor,  # (n,), or (s, n); out
    valid_tokens: ValidTokens,
    *,
    raises: Tensor | None = None,  # () int32, raised to the bits of the largest sum
    guarded_by: Tensor | None = None,  # () int32: nothing is done unless it holds a sum that is too large
) -> None:
    tiles, n = partial.shape[-2], row_sum.shape[-1]
    grid = (cdiv(n, BLOCKS["BLOCK_N"]), 1 if partial.dim() == 2 else partial.shape[0])
    guard = raises if guarded_by is None else guarded_by
    sum_tiles_kernel[grid](partial, row_sum, guard, valid_tokens, n, tiles, GUARDED=guarded_by is not None, **BLOCKS)


@Kernel
def max_and_sum_kernel(
    guard_ptr,  # () int32 that holds the largest row sum; None: every row, two results
    partial_max_ptr,  # (T, n) base 2
    partial_ptr,  # (T, n)
    row_sum_ptr,  # (n,), read only if there is a guard
    # (2, n) out: max_t partial_max_t, and log2 sum_t partial_t exp2(partial_max_t - that maximum). With the guard: (n,)
    # out, the sum of both, written only for rows whose row_sum is too large: other rows keep their bits.
    out_ptr,
    valid_tokens,  # ValidTokens
    n,
    T,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = valid_rows(valid_tokens, n)
    if guard_ptr is None:
        end = tl.where(tl.program_id(0) * BLOCK_N < count, T, 0)
    else:
        end = tl.where(exceeds(guard_ptr), T, 0)
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
    if guard_ptr is None:
        # a rank whose classes are all at -inf gets probabilities of 0, not nan
        running_max = tl.where(running_max == float("-inf"), 0.0, running_max)
        tl.store(out_ptr + rows, running_max, mask=rows < count)
        tl.store(out_ptr + n + rows, tl.log2(running_sum), mask=rows < count)
    else:
        row_sum = tl.load(row_sum_ptr + rows, mask=rows < count, other=0.0)
        rescued = (row_sum > LARGEST_SUM) | (row_sum != row_sum)
        # if all classes of a row are at -inf, any finite reference makes the exponentials 0
        lse2 = tl.where(running_sum == 0.0, 0.0, running_max + tl.log2(running_sum))
        tl.store(out_ptr + rows, lse2, mask=(rows < tl.where(end > 0, count, 0)) & rescued)


def launch_max_and_sum(
    partial_max: Tensor,  # (T, n')
    partial: Tensor,  # (T, n')
    out: Tensor,  # (2, n), or (n,)
    valid_tokens: ValidTokens,
    *,
    row_sum: Tensor | None = None,  # (n,), given together with `guarded_by`
    guarded_by: Tensor | None = None,
) -> None:
    tiles, n = partial.shape[0], out.shape[-1]
    grid = (cdiv(n, BLOCKS["BLOCK_N"]),)
    max_and_sum_kernel[grid](guarded_by, partial_max, partial, row_sum, out, valid_tokens, n, tiles, **BLOCKS)
