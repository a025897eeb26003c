"""G of rows whose logits were retained: what the logits GEMM's epilogue "gradient" makes of them, without the GEMM.

    for each tile:  z = decoded codes                              (logit_codes.py)
                    out = gradient(z), rounded once                (epilogues.py)

Two bytes a logit are read and two are written, to workspace: backward may run again, and reads the codes again.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.gemm.epilogues import Gradient, gradient
from flce_ops.triton.gemm.gemm_operands import load_tile, store_tile
from flce_ops.triton.gemm.target import interpreted
from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.kept_tokens import ROW_MULTIPLE, Kept, kept_rows
from flce_ops.triton.steps.logit_codes import Coding, LogitCodes, coding, decoded, largest_places

# n rows, V vocabulary, v classes of a slice


@Kernel
def retained_gradient_kernel(
    codes_ptr,  # (n, V) int16, from the slice's first column
    out_ptr,  # (n, v) out, zeros behind the kept rows up to a multiple of 128
    coding,  # Coding
    operands,  # Gradient
    kept,  # Kept
    n,
    v,
    first_tile,  # of the slice
    stride_codes_n,
    stride_out_n,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,  # a tile, of one maximum a row
    ALIGNED: tl.constexpr,  # columns of `out` in 16 bytes
):
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = kept_rows(kept, n)
    if tl.program_id(1) * BLOCK_N < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE:
        cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        row_mask, col_mask = rows < count, cols < v
        # with what pads the rows: loads and stores of 16 bytes, whatever v is
        inside = cols < tl.cdiv(v, ALIGNED) * ALIGNED
        code = load_tile(codes_ptr, rows, cols, row_mask, inside, stride_codes_n)
        largest = tl.load(largest_places(coding, rows, first_tile + tile), mask=row_mask, other=0.0)
        z = decoded(code, largest, coding.steps)
        result = gradient(operands, z, rows, cols, row_mask, col_mask, tile, n, v, True)
        store_tile(out_ptr, result, rows, cols, rows < n, inside, stride_out_n)


def launch_retained_gradient(
    codes: LogitCodes,
    columns: slice,  # from a multiple of `tile`
    operands: Gradient,  # its class weights are those of the columns
    kept: Kept,
    *,
    out: Tensor,  # (n, v)
    tile: int,  # of the GEMM that made the codes
) -> None:
    assert out.stride(1) == 1 and columns.start % tile == 0
    n, classes = out.shape
    numbers = codes.numbers[:, columns]
    of_codes: Coding = coding(codes, out.dtype)
    # ms of 2048x128256, without / with an entropy: 0.324 / 0.332; of 16 rows 0.341 / 0.379
    block_n = 16 if interpreted(numbers) else 8
    retained_gradient_kernel[(triton.cdiv(classes, tile), triton.cdiv(n, block_n))](
        numbers,
        out,
        of_codes,
        operands,
        kept,
        n,
        classes,
        columns.start // tile,
        numbers.stride(0),
        out.stride(0),
        BLOCK_N=block_n,
        BLOCK_V=tile,
        ALIGNED=16 // out.itemsize,
        num_warps=4,
    )
