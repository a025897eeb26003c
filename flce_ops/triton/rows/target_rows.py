"""Recomputes rows of grad_linear_weight whose class is the target of few tokens, with c input in two 16-bit numbers.

             n                   D
        ┌─────────┐         ┌─────────┐
      n │ E[:, y] │ T  @  n │ c x     │  +  the same with what rounding took from c x; a row for each target y_i
        └─────────┘         └─────────┘

Such a row often comes from one token: c x times an entry of E, which the corrected factor makes exact (finish_rows.py).
Then the rounding of c x is the only error. Plain torch often has no error there, because the target's logit gradient,
rounded to bfloat16 or float16, is often a power of two or close to one. In an emulation of bfloat16 (docs/numerics.md)
the second 16-bit number reduces the error from 1.6e-3 to 7e-5 at 16 tokens, reduction="sum" and 64000 classes (plain
torch 1.3e-4), and from 2.3e-3 to 1.7e-3 at 60 tokens and "mean" (plain torch 3.8e-3). Adding the second 16-bit number
in the GEMM over all classes would cost 0.3 of 1.4 ms at 128x4096x151936.
"""

import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..gemm.tiles import load_tile, matrix_of, store_tile
from ..kernel import Kernel
from .valid_tokens import ValidTokens, valid_rows

# n tokens, D hidden, V vocabulary

TOKENS_AT_MOST = 128  # each row of the result reads all tokens: 19 us at 128x4096, 41 at 256x2048

BLOCK_M, BLOCK_N, BLOCK_K = tl.constexpr(64), tl.constexpr(128), tl.constexpr(64)  # targets, features, tokens


@Kernel
def target_rows_kernel(
    exponentials,  # (n, V)
    rows,  # (n, D), c input
    rest,  # (n, D), what rounding took from c input
    column_ptr,  # (n,) int64, the tokens' target columns; -1 for targets of other ranks
    out,  # (V, D), rows of which are written
    valid_tokens,  # ValidTokens
    n,
    D,
):
    """Tokens with the same target write the same numbers to the same place."""
    count = valid_rows(valid_tokens, n)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.load(column_ptr + i, mask=i < count, other=-1)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(tl.cdiv(count, BLOCK_K)):
        ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
        a = load_tile(exponentials, ks, column, ks < count, column >= 0)
        high = load_tile(rows, ks, features, ks < count, features < D)
        low = load_tile(rest, ks, features, ks < count, features < D)
        acc = tl.dot(a.T, high, acc)
        acc = tl.dot(a.T, low, acc)
    store_tile(out, acc, column, features, column >= 0, features < D)


def launch_target_rows(
    out: Tensor,  # (V, D)
    exponentials: Tensor,  # (n, V)
    rows: Tensor,  # (n, D)
    rest: Tensor,  # (n, D)
    column: Tensor,  # (n,)
    valid_tokens: ValidTokens,
) -> None:
    n, hidden = rows.shape
    matrices = map(matrix_of, (exponentials, rows, rest))
    target_rows_kernel[(cdiv(n, BLOCK_M.value), cdiv(hidden, BLOCK_N.value))](
        *matrices, column, matrix_of(out), valid_tokens, n, hidden, num_warps=4, num_stages=2
    )
