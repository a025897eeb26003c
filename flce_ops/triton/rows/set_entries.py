"""matrix[i, column_ik] = value_ik for valid tokens. Columns outside of the matrix, such as -1, are skipped.

Equal columns of a row have equal values.
"""

import triton.language as tl
from torch import Tensor

from ...support.integers import cdiv
from ..kernel import Kernel
from .valid_tokens import ValidTokens, valid_rows

# n rows of a chunk, K classes of a token, C columns


@Kernel
def set_entries_kernel(
    matrix_ptr,  # (n, C)
    column_ptr,  # (n, K)
    value_ptr,  # (n, K)
    valid_tokens,  # ValidTokens
    n,
    C,
    stride_n,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = places // TOPK
    mask = rows < valid_rows(valid_tokens, n)
    column = tl.load(column_ptr + places, mask=mask, other=-1)
    value = tl.load(value_ptr + places, mask=mask, other=0.0)
    inside = mask & (column >= 0) & (column < C)
    tl.store(matrix_ptr + rows.to(tl.int64) * stride_n + column, value.to(matrix_ptr.dtype.element_ty), mask=inside)


def launch_set_entries(matrix: Tensor, column: Tensor, value: Tensor, valid_tokens: ValidTokens) -> None:
    """`column` and `value` are (n,) or (n, K)."""
    assert matrix.stride(1) == 1
    (rows, columns), places = matrix.shape, 1 if column.dim() == 1 else column.shape[1]
    set_entries_kernel[(cdiv(rows * places, 128),)](
        matrix, column, value, valid_tokens, rows, columns, matrix.stride(0), TOPK=places, BLOCK=128
    )
