"""Sums in float32, in a fixed order.

over rows     sum_i factor_i matrix_ij: bias gradients
over tiles    the numbers that epilogues store for each row and tile of the vocabulary, (T, n) to (n,). In memory
              they are (T, n'), where n' is n rounded up to a multiple of 16.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..gemm.tiles import load_tile, matrix_of
from ..kernel import Kernel
from .valid_tokens import ValidTokens, row_distance, valid_rows

# n rows, C columns, S slices of the rows, T tiles along the vocabulary, s sums of each row


class RowSums(NamedTuple):
    """Sums over the classes of each row, (n,) each, in base 2; None if not requested."""

    exponentials: (
        Tensor  # sum of exp2(z2 - reference_logit); if `tiles` is given, the reader adds these up and writes it
    )
    reference_logit: Tensor
    tiles: Tensor | None = None  # (T, n'), the same sum over each tile
    logit_sum: Tensor | None = None  # sum of w z2
    expected: Tensor | None = None  # sum of exp2(z2 - reference_logit) (z2 - reference_logit)
    max_logit: Tensor | None = None  # z2
    argmax: Tensor | None = None  # int64, the first of equals
    squares: Tensor | None = None  # sum of exp2(z2 - reference_logit)^2
    total: Tensor | None = None  # sum of z2


class Asked(NamedTuple):
    """Which fields of RowSums are requested, besides the first three. `argmax` also gives max_logit."""

    logit_sum: bool = False
    expected: bool = False
    argmax: bool = False
    squares: bool = False
    total: bool = False

    @property
    def numbers(self) -> int:
        """How many numbers the epilogue stores for a row and tile."""
        return sum(self) + self.argmax


NOTHING_ELSE = Asked()

PROGRAMS = 1024  # about eight a multiprocessor
ROWS_AT_LEAST = 128  # rows of a slice
BLOCK_R, BLOCK_C = tl.constexpr(32), tl.constexpr(128)


@Kernel
def weighted_column_sum_kernel(
    matrix,  # (n, C)
    partial_ptr,  # (S, C) out
    n,
    C,
    rows_per_split,
    factor_ptr,  # (n,) float32
    valid_tokens,  # ValidTokens: only their rows are summed; None: all rows
):
    """One program sums BLOCK_C columns over one of S slices of the rows."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * rows_per_split
    rows_to_sum = n
    if valid_tokens is not None:
        rows_to_sum = valid_rows(valid_tokens, n)
    last = tl.minimum(first + rows_per_split, rows_to_sum)
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        values = load_tile(matrix, rows, cols, rows < last, cols < C).to(tl.float32)
        if factor_ptr is not None:
            values *= tl.load(factor_ptr + rows, mask=rows < last, other=0.0)[:, None]
        acc += values
    tl.store(partial_ptr + split.to(tl.int64) * C + cols, tl.sum(acc, 0), mask=cols < C)


def weighted_column_sum(
    matrix: Tensor,  # (n, C)
    factor: Tensor | None,  # (n,) float32, in the order of the valid tokens; None for 1
    valid_tokens: ValidTokens | None = None,  # only their rows are summed; None: all rows
) -> Tensor:  # (C,) float32
    """Sums in two steps, with enough slices to keep a GPU's memory busy. The second step sums the (S, C) partial sums
    in the same way.
    """
    rows, columns = matrix.shape
    column_blocks = cdiv(columns, BLOCK_C.value)
    splits = max(1, min(rows // ROWS_AT_LEAST, cdiv(PROGRAMS, column_blocks)))
    partial = torch.empty(splits, columns, dtype=torch.float32, device=matrix.device)
    of_matrix = matrix_of(matrix), partial, rows, columns, cdiv(rows, splits), factor, valid_tokens
    weighted_column_sum_kernel[(column_blocks, splits)](*of_matrix, num_warps=4)
    return partial[0] if splits == 1 else weighted_column_sum(partial, None)


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
