"""The kept tokens' rows of a matrix side by side, zeros behind them: gather_tokens.py where there is no target.

A kernel of its own: there a program walks one row, whose product with the target's it adds up; a copy has nothing to
add up, and blocks of rows and features make four loads of 16 bytes a thread whatever D is.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.kept_tokens import ROW_MULTIPLE, Kept, kept_rows
from flce_ops.triton.replay import Kernel

# N tokens, n rows of a chunk, D hidden


@Kernel
@triton.jit
def gather_rows_kernel(
    kept,  # Kept
    matrix_ptr,  # (N, D)
    rows_ptr,  # (n, D) out, zeros behind the kept rows up to a multiple of 128
    n,
    D,
    stride_matrix_n,
    stride_matrix_d,
    stride_rows_n,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = kept_rows(kept, n)
    end = tl.minimum(tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE, n)
    token = tl.load(kept.order + rows, mask=rows < count, other=0).to(tl.int64)
    values = tl.load(
        matrix_ptr + token[:, None] * stride_matrix_n + d.to(tl.int64)[None, :] * stride_matrix_d,
        mask=(rows < count)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    places = rows.to(tl.int64)[:, None] * stride_rows_n + d[None, :]
    tl.store(rows_ptr + places, values, mask=(rows < end)[:, None] & (d < D)[None, :])


def launch_gather_rows(kept: Kept, matrix: Tensor, rows: Tensor) -> None:  # (N, D) -> (n, D)
    assert rows.stride(1) == 1
    n, hidden = rows.shape
    block_n, block_d = 8, 512
    gather_rows_kernel[(triton.cdiv(n, block_n), triton.cdiv(hidden, block_d))](
        kept, matrix, rows, n, hidden, *matrix.stride(), rows.stride(0), BLOCK_N=block_n, BLOCK_D=block_d, num_warps=4
    )
