"""A low-rank pair beside a head, inside the kernels that make logits.

                D              r
           ┌─────────┐      ┌───┐
         n │    x    │  @   │ h │  @        product = x @ W.T + h @ B.T        r = 16, 32, or a multiple of 64
           └─────────┘      └───┘
                V              V

With tensor maps, the main loop of the logits GEMM continues over h and B: each step selects the tensor maps of one
product or of the other, and columns after the last are zeros. A separate product after the loop would wait for its
loads, and ptxas serialises the loop's products if another product adds to the same registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from ...support.integers import cdiv, next_power_of_2
from ..gemm.tma import load_tile

# N tokens, n rows of a chunk, V vocabulary, r rank of the pair

BLOCK_R = tl.constexpr(64)


class Pair(NamedTuple):
    """Contiguous tensors. Passed to kernels as one argument."""

    input: Tensor | None = None  # (N, r); for a chunk (n, r)
    weight: Tensor | None = None  # (V, r)

    @property
    def rank(self) -> int:
        return 0 if self.weight is None else self.weight.shape[1]

    def of(self, classes: slice) -> "Pair":
        return self if self.weight is None else Pair(self.input, self.weight[classes])


NO_PAIR = Pair()


def padded_rank(matrix: Tensor) -> Tensor:
    """Pads a matrix (rows, r) with columns of zeros to a width that tiles divide."""
    rank = matrix.shape[1]
    wanted = max(16, next_power_of_2(rank)) if rank <= BLOCK_R.value else cdiv(rank, 64) * 64
    return pad(matrix, (0, wanted - rank)) if wanted > rank else matrix.contiguous()


@triton.jit
def add_pair_product(
    acc,
    input,  # Matrix, (n, r)
    weight,  # Matrix, (V, r)
    rows,
    cols,
    row_mask,
    col_mask,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Adds h @ B.T to a tile, by pointers."""
    for start in tl.range(0, RANK, BLOCK_R, num_stages=1):  # unrolled, two steps would exceed the shared memory
        ks = start + tl.arange(0, BLOCK_R)
        h = load_tile(input, rows, ks, row_mask, ks < RANK)
        b = load_tile(weight, cols, ks, col_mask, ks < RANK)
        acc = tl.dot(h, b.T, acc)
    return acc


@triton.jit
def pair_logit(pair, token, column, RANK: tl.constexpr):
    """The dot product h_token . B_column."""
    WIDTH: tl.constexpr = min(RANK, BLOCK_R)
    acc = tl.zeros((WIDTH,), tl.float32)
    for start in tl.static_range(0, RANK, WIDTH):
        ks = start + tl.arange(0, WIDTH)
        h = tl.load(pair.input + token * RANK + ks)
        acc += h.to(tl.float32) * tl.load(pair.weight + column * RANK + ks).to(tl.float32)
    return tl.sum(acc, 0)
