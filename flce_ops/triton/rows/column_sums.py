"""sum_i factor_i matrix_ij in float32, in a fixed order: bias gradients, and sums over the tiles of a row."""

import torch
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..gemm.tma import load_tile, matrix_of
from ..kernel import Kernel
from .valid_tokens import ValidTokens, valid_rows

# n rows, C columns, S slices of the rows

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
