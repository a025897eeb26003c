"""matrix[i, column_ik - start] = value_ik of the kept tokens, where column_ik is not -1 and among the matrix's.

Equal columns of a row have equal values.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.kept_tokens import Kept, kept_rows

# n rows of a chunk, K slots (1 of a class a token), C columns of a slice


@Kernel
def set_entries_kernel(
    matrix_ptr,  # (n, C)
    column_ptr,  # (n, K)
    value_ptr,  # (n, K)
    kept,  # Kept
    n,
    C,
    stride_n,
    start,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = slots // SLOTS
    mask = rows < kept_rows(kept, n)
    target_column = tl.load(column_ptr + slots, mask=mask, other=-1)
    column = target_column - start
    value = tl.load(value_ptr + slots, mask=mask, other=0.0)
    inside = mask & (target_column >= 0) & (column >= 0) & (column < C)
    tl.store(matrix_ptr + rows.to(tl.int64) * stride_n + column, value.to(matrix_ptr.dtype.element_ty), mask=inside)


def launch_set_entries(matrix: Tensor, column: Tensor, value: Tensor, kept: Kept, *, start: int) -> None:
    """`column` and `value` are (n,) or (n, K); the matrix holds the columns from `start`."""
    assert matrix.stride(1) == 1
    (rows, columns), slots = matrix.shape, 1 if column.dim() == 1 else column.shape[1]
    set_entries_kernel[(triton.cdiv(rows * slots, 128),)](
        matrix, column, value, kept, rows, columns, matrix.stride(0), start, SLOTS=slots, BLOCK=128
    )
