"""A low-rank pair beside a head, inside the kernels that make logits of it.

                D              r
           ┌─────────┐      ┌───┐
         n │    x    │  @   │ h │  @        product = x @ W.T + h @ B.T        r = 16, 32, or a multiple of 64
           └─────────┘      └───┘
                V              V

The logits GEMM adds the second product to its tile in registers, behind the main loop, by loads of its own: of r
features there is nothing to pipeline, and a tile of h and of B comes from the L2.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from flce_ops.triton.gemm_operands import load_tile

# N tokens, n rows of a chunk, V vocabulary, r rank of the pair

BLOCK_R = tl.constexpr(64)


class Pair(NamedTuple):
    """Contiguous; one argument of a kernel."""

    input: Tensor | None = None  # (N, r), or (n, r) of the kept tokens
    weight: Tensor | None = None  # (V, r)

    @property
    def rank(self) -> int:
        return 0 if self.weight is None else self.weight.shape[1]

    def of(self, classes: slice) -> "Pair":
        return self if self.weight is None else self._replace(weight=self.weight[classes])


NO_PAIR = Pair()


def even_rank(matrix: Tensor) -> Tensor:
    """(rows, r) with zeros behind its columns up to a number that tiles divide; itself where there are so many."""
    rank = matrix.shape[1]
    wanted = max(16, triton.next_power_of_2(rank)) if rank <= BLOCK_R.value else -(-rank // 64) * 64
    return pad(matrix, (0, wanted - rank)) if wanted > rank else matrix.contiguous()


@triton.jit
def add_pair_product(acc, pair, rows, cols, row_mask, col_mask, RANK: tl.constexpr, PRECISION: tl.constexpr):
    """acc + h @ B.T of a tile."""
    WIDTH: tl.constexpr = min(RANK, BLOCK_R)
    for start in tl.static_range(0, RANK, WIDTH):
        ks = start + tl.arange(0, WIDTH)
        h = load_tile(pair.input, rows, ks, row_mask, ks < RANK, RANK)
        b = load_tile(pair.weight, cols, ks, col_mask, ks < RANK, RANK)
        acc = tl.dot(h, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def pair_logit(pair, token, column, RANK: tl.constexpr):
    """h_token . B_column"""
    WIDTH: tl.constexpr = min(RANK, BLOCK_R)
    acc = tl.zeros((WIDTH,), tl.float32)
    for start in tl.static_range(0, RANK, WIDTH):
        ks = start + tl.arange(0, WIDTH)
        h = tl.load(pair.input + token * RANK + ks)
        acc += h.to(tl.float32) * tl.load(pair.weight + column * RANK + ks).to(tl.float32)
    return tl.sum(acc, 0)
