"""out = factor matrix, by rows, rounded once. ATen takes 3 x the time for a half matrix and a float32 factor."""

import triton
import triton.language as tl
from torch import Tensor

# n rows, C columns


@triton.jit
def scale_rows_kernel(
    matrix_ptr,  # (n, C)
    factor_ptr,  # (n,) float32
    out_ptr,  # (n, C)
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
    tl.store(out_ptr + row * stride_out_n + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def launch_scale_rows(matrix: Tensor, factor: Tensor, out: Tensor) -> None:
    assert out.stride(1) == 1
    rows, columns = matrix.shape
    block = min(2048, triton.next_power_of_2(columns))
    scale_rows_kernel[(rows, triton.cdiv(columns, block))](
        matrix, factor, out, columns, *matrix.stride(), out.stride(0), BLOCK_C=block, num_warps=4
    )
