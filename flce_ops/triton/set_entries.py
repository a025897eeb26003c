"""matrix[i, column_i] = value_i, where the column is among the matrix's."""

import triton
import triton.language as tl
from torch import Tensor

# n rows of a chunk, C columns of a slice


@triton.jit
def set_entries_kernel(
    matrix_ptr,  # (n, C)
    column_ptr,  # (n,)
    value_ptr,  # (n,)
    n,
    C,
    stride_n,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.load(column_ptr + rows, mask=rows < n, other=-1).to(tl.int64)
    value = tl.load(value_ptr + rows, mask=rows < n, other=0.0)
    inside = (rows < n) & (column >= 0) & (column < C)
    tl.store(matrix_ptr + rows.to(tl.int64) * stride_n + column, value.to(matrix_ptr.dtype.element_ty), mask=inside)


def launch_set_entries(matrix: Tensor, column: Tensor, value: Tensor) -> None:
    rows, columns = matrix.shape
    set_entries_kernel[(triton.cdiv(rows, 128),)](matrix, column, value, rows, columns, matrix.stride(0), BLOCK_N=128)
