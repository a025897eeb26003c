"""Label smoothing adds the rank-1 matrix m_i w_j to the logit gradient: m_i = g s d_sum, w the class weights or ones.

A one-pass step stores E, with G = c E' by rows and c = g d_lse s / Z (finish_rows.py). There it becomes

    E'_ij += k_i w_j        k_i = Z d_sum / d_lse, made in finish_rows.py, which adds it to the target's entry itself

rounded to E's dtype, as G is where it is made by element. This pass reads and writes E once: 0.25 of 10 ms at
2048x4096x128256 (H200). The loss needs the row's logit sum, which the GEMM's epilogue stores for each tile. Under a
softcap the gradient is made in backward instead, because the slope of each logit is gone when E is stored.
"""

import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..gemm.tiles import load_tile, matrix_of, store_tile
from ..kernel import Kernel
from .valid_tokens import ValidTokens, valid_rows

# n rows of a chunk, V vocabulary

BLOCK_N, BLOCK_V = tl.constexpr(8), tl.constexpr(512)


@Kernel
def smoothing_kernel(
    exponentials,  # (n, V), added to
    factor_ptr,  # (n,), k
    class_weight_ptr,  # (V,) float32; None for ones
    valid_tokens,  # ValidTokens
    n,
    V,
):
    tiles = tl.cdiv(V, BLOCK_V)
    row_start = tl.program_id(0) // tiles * BLOCK_N
    count = valid_rows(valid_tokens, n)
    if row_start < count:
        rows = row_start + tl.arange(0, BLOCK_N)
        cols = tl.program_id(0) % tiles * BLOCK_V + tl.arange(0, BLOCK_V)
        row_mask, col_mask = rows < count, cols < V
        added = tl.load(factor_ptr + rows, mask=row_mask, other=0.0)[:, None]
        if class_weight_ptr is not None:
            added = added * tl.load(class_weight_ptr + cols, mask=col_mask, other=0.0)[None, :]
        values = load_tile(exponentials, rows, cols, row_mask, col_mask).to(tl.float32) + added
        store_tile(exponentials, values, rows, cols, row_mask, col_mask)


def launch_smoothing(
    exponentials: Tensor,  # (n, V), added to; the targets' entries are set after it
    factor: Tensor,  # (n,) float32
    class_weight: Tensor | None,  # (V,) float32
    valid_tokens: ValidTokens,
) -> None:
    n, classes = exponentials.shape
    grid = (cdiv(n, BLOCK_N.value) * cdiv(classes, BLOCK_V.value),)
    smoothing_kernel[grid](matrix_of(exponentials), factor, class_weight, valid_tokens, n, classes, num_warps=4)
