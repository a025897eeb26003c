"""matrix[i, target_i - start] = value_i, where that is one of the matrix's columns and the target is not ignored."""

import triton
import triton.language as tl
from torch import Tensor

# n rows of a chunk, C columns of a slice


@triton.jit
def set_entries_kernel(
    matrix_ptr,  # (n, C)
    target_ptr,  # (n,)
    value_ptr,  # (n,)
    n,
    C,
    stride_n,
    start,
    ignore_index,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = tl.load(target_ptr + rows, mask=rows < n, other=ignore_index).to(tl.int64)
    column = target - start
    value = tl.load(value_ptr + rows, mask=rows < n, other=0.0)
    inside = (rows < n) & (target != ignore_index) & (column >= 0) & (column < C)
    tl.store(matrix_ptr + rows.to(tl.int64) * stride_n + column, value.to(matrix_ptr.dtype.element_ty), mask=inside)


def launch_set_entries(matrix: Tensor, target: Tensor, value: Tensor, *, start: int, ignore_index: int) -> None:
    """`target` and `value` are (n,); the matrix holds the classes from `start`."""
    assert matrix.stride(1) == 1
    rows, columns = matrix.shape
    set_entries_kernel[(triton.cdiv(rows, 128),)](
        matrix, target, value, rows, columns, matrix.stride(0), start, ignore_index, BLOCK_N=128
    )
