"""matrix[i, column_i - start] = value_i of the kept tokens, where column_i is not -1 and among the matrix's."""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.replay import Kernel

# n rows of a chunk, C columns of a slice


@Kernel
@triton.jit
def set_entries_kernel(
    matrix_ptr,  # (n, C)
    column_ptr,  # (n,)
    value_ptr,  # (n,)
    kept,  # Kept
    n,
    C,
    stride_n,
    start,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < kept_rows(kept, n)
    target_column = tl.load(column_ptr + rows, mask=mask, other=-1)
    column = target_column - start
    value = tl.load(value_ptr + rows, mask=mask, other=0.0)
    inside = mask & (target_column >= 0) & (column >= 0) & (column < C)
    tl.store(matrix_ptr + rows.to(tl.int64) * stride_n + column, value.to(matrix_ptr.dtype.element_ty), mask=inside)


def launch_set_entries(matrix: Tensor, column: Tensor, value: Tensor, kept: Kept, *, start: int = 0) -> None:
    """`column` and `value` are (n,); the matrix holds the columns from `start`."""
    assert matrix.stride(1) == 1
    rows, columns = matrix.shape
    set_entries_kernel[(triton.cdiv(rows, 128),)](
        matrix, column, value, kept, rows, columns, matrix.stride(0), start, BLOCK_N=128
    )
