"""Rows of kept tokens go to where the tokens are, the others become 0: in place, as no row moves down.

                 kept tokens first          as the tokens stand
    place        0 1 2 3 - -       ->       0 - 1 - 2 3

A program owns some columns. From the last row to the first it reads a block of rows and then writes it. What it reads
afterwards lies before the block, and no barrier waits for the writes. Where all tokens are kept there is nothing to do.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.replay import Kernel
from flce_ops.triton.target import interpreted

# N tokens, D hidden


@Kernel
@triton.jit
def spread_rows_kernel(
    matrix_ptr,  # (N, D)
    place_ptr,  # (N,)
    count_ptr,  # ()
    N,
    D,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.where(tl.load(count_ptr) < N, tl.cdiv(N, BLOCK_N), 0)
    for block in range(0, blocks):
        rows = (blocks - 1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.load(place_ptr + rows, mask=rows < N, other=-1)
        values = tl.load(
            matrix_ptr + place.to(tl.int64)[:, None] * stride_n + cols[None, :],
            mask=(place >= 0)[:, None] & (cols < D)[None, :],
            other=0.0,
        )
        tl.debug_barrier()  # all of the block is read before any of it is written
        tl.store(
            matrix_ptr + rows.to(tl.int64)[:, None] * stride_n + cols[None, :],
            values,
            mask=(rows < N)[:, None] & (cols < D)[None, :],
        )


def launch_spread_rows(matrix: Tensor, kept: Kept, place: Tensor) -> None:
    assert matrix.stride(1) == 1
    tokens, columns = matrix.shape
    # 64 bytes of half numbers; 128 programs at D = 4096, where fewer columns each took 1.5 times as long. Fewer rows at
    # a time wait for the memory more often: H200, 23 us at 8192x1024, 33 with 256 rows.
    block_d = 64 if interpreted(matrix) else 32
    spread_rows_kernel[(triton.cdiv(columns, block_d),)](
        matrix, place, kept.total, tokens, columns, matrix.stride(0), BLOCK_N=1024, BLOCK_D=block_d, num_warps=8
    )
