"""out = factor matrix, by rows, rounded once; and what that rounding took, where there is memory for it.

ATen takes 3 x the time for a half matrix and a float32 factor.
"""

import triton
import triton.language as tl
from torch import Tensor

# n rows, C columns


@triton.jit
def scale_rows_kernel(
    matrix_ptr,  # (n, C)
    factor_ptr,  # (n,) float32
    out_ptr,  # (n, C)
    rest_ptr,  # (n, C) out, strides as out's; or None
    C,
    stride_matrix_n,
    stride_matrix_c,
    stride_out_n,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < C
    places = row * stride_matrix_n + cols.to(tl.int64) * stride_matrix_c
    value = tl.load(matrix_ptr + places, mask=mask, other=0.0).to(tl.float32) * tl.load(factor_ptr + row)
    rounded = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out_n + cols, rounded, mask=mask)
    if rest_ptr is not None:
        rounded = rounded.to(tl.float32)
        rest = tl.where(tl.abs(rounded) == float("inf"), 0.0, value - rounded)  # not inf - inf
        tl.store(rest_ptr + row * stride_out_n + cols, rest.to(rest_ptr.dtype.element_ty), mask=mask)


def launch_scale_rows(matrix: Tensor, factor: Tensor, out: Tensor, rest: Tensor | None = None) -> None:
    assert out.stride(1) == 1 and (rest is None or rest.stride() == out.stride())
    rows, columns = matrix.shape
    block = min(2048, triton.next_power_of_2(columns))
    scale_rows_kernel[(rows, triton.cdiv(columns, block))](
        matrix, factor, out, rest, columns, *matrix.stride(), out.stride(0), BLOCK_C=block, num_warps=4
    )
