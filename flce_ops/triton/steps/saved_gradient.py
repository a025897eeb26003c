"""G of rows whose logits were saved: does what the logits GEMM's epilogue "gradient" does, without the GEMM.

    for each tile:  z = dequantized                                (quantized_logits.py)
                    out = gradient(z), rounded once                (epilogues.py)

The kernel reads two bytes per logit and writes two, into the workspace. The saved logits stay unchanged, because
backward may run again.
"""

import triton.language as tl
from torch import Tensor

from ...support.integers import cdiv
from ..gemm.device import interpreted
from ..gemm.epilogues import Gradient, gradient
from ..gemm.tma import load_tile, matrix_of, store_tile
from ..kernel import Kernel
from ..rows.valid_tokens import ROW_MULTIPLE, ValidTokens, valid_rows
from .quantized_logits import QuantizedLogits, dequantize, largest_places

# n rows, V vocabulary


@Kernel
def saved_gradient_kernel(
    numbers,  # (n, V) int16
    out,  # (n, V) out, with zeros behind the valid rows up to a multiple of 128
    quantized,  # QuantizedLogits
    operands,  # Gradient
    valid_tokens,  # ValidTokens
    n,
    V,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,  # one tile, with one maximum per row
    ALIGNED: tl.constexpr,  # the number of columns of `out` in 16 bytes
):
    tiles = tl.cdiv(V, BLOCK_V)
    tile = tl.program_id(0) % tiles  # in one dimension of the grid: the second one has room for 65,535 programs
    row_start = tl.program_id(0) // tiles * BLOCK_N
    rows = row_start + tl.arange(0, BLOCK_N)
    count = valid_rows(valid_tokens, n)
    if row_start < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE:
        cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        row_mask, col_mask = rows < count, cols < V
        # includes the padding of rows, so that loads and stores have 16 bytes for any V
        inside = cols < tl.cdiv(V, ALIGNED) * ALIGNED
        q = load_tile(numbers, rows, cols, row_mask, inside)
        largest = tl.load(largest_places(quantized, rows, tile), mask=row_mask, other=0.0)
        z = dequantize(q, largest, quantized.steps)
        result = gradient(operands, z, rows, cols, row_mask, col_mask, tile, n, V, True)
        store_tile(out, result, rows, cols, rows < n, inside)


def launch_saved_gradient(
    quantized: QuantizedLogits,
    operands: Gradient,  # its class weights are those of the columns
    valid_tokens: ValidTokens,
    *,
    out: Tensor,  # (n, V)
    tile: int,  # tile width of the GEMM that wrote them
) -> None:
    n, classes = out.shape
    numbers = quantized.numbers[:, :classes]
    # ms at 2048x128256, without / with an entropy: 0.324 / 0.332 at 8 rows; 0.341 / 0.379 at 16 rows
    block_n = 16 if interpreted(numbers) else 8
    saved_gradient_kernel[(cdiv(classes, tile) * cdiv(n, block_n),)](
        matrix_of(numbers),
        matrix_of(out),
        quantized,
        operands,
        valid_tokens,
        n,
        classes,
        BLOCK_N=block_n,
        BLOCK_V=tile,
        ALIGNED=16 // out.itemsize,
        num_warps=4,
    )
