"""The kept tokens' rows of a matrix side by side, zeros behind them: gather_tokens.py where there is no target."""

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
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    count = kept_rows(kept, n)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    # not (d < D) & (row < ...): a scalar in a mask makes it integers, which Triton 3.9's interpreter refuses
    mask = d < tl.where(row < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE, D, 0)
    token = tl.load(kept.order + row).to(tl.int64)
    values = tl.load(
        matrix_ptr + token * stride_matrix_n + d.to(tl.int64) * stride_matrix_d,
        mask=d < tl.where(row < count, D, 0),
        other=0.0,
    )
    tl.store(rows_ptr + row * stride_rows_n + d, values, mask=mask)


def launch_gather_rows(kept: Kept, matrix: Tensor, rows: Tensor) -> None:  # (N, D) -> (n, D)
    assert rows.stride(1) == 1
    n, hidden = rows.shape
    block_d = min(1024, triton.next_power_of_2(hidden))
    gather_rows_kernel[(n, triton.cdiv(hidden, block_d))](
        kept, matrix, rows, n, hidden, *matrix.stride(), rows.stride(0), BLOCK_D=block_d, num_warps=4
    )
