"""The three products by torch.matmul: a second backend, chosen by FLCE_GEMM=torch (backends.py). It is here to compare
with cuBLAS, and shows what a backend has to do. It is slower: products pass through memory in float32.

    logits             rows @ linear_weight.T in float32, (n, V); the epilogues of logits_gemm.py read these tiles
    weight_gradient    E.T @ rows in float32, added to a float32 sum over chunks, rounded once
    input_gradient     E @ linear_weight in float32, finished in ATen, rounded once

Only the device knows how many rows are valid. What follows them in memory may be nan, so it is replaced by zeros. The
float32 products are beside the workspace: 4 n V bytes.
"""

from typing import Any

import torch
from torch import Tensor

from ...support.sizes import cdiv
from ..rows.valid_tokens import ValidTokens
from .input_gradient import SUMMED, Finish
from .logits_gemm import launch_logits_gemm
from .tiles import EVERY_BLOCK, ClassBlocks

# n rows of a chunk, D hidden, V vocabulary

UNSUPPORTED = "FLCE_GEMM=torch: {what} needs the Triton GEMMs; unset FLCE_GEMM"


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def is_valid(valid_tokens: ValidTokens, n: int) -> Tensor:  # (n, 1) bool
    return (torch.arange(n, device=valid_tokens.total.device) < valid_tokens.total - valid_tokens.start)[:, None]


def launch_logits(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    *others: Any,
    guard: Tensor | None = None,
    **options: Any,
) -> list:
    """Takes the arguments of launch_logits_gemm."""
    # A pass with a guard nearly always returns at once, which only a kernel can.
    products = product(input, linear_weight.T) if guard is None else None
    return launch_logits_gemm(input, linear_weight, *others, guard=guard, products=products, **options)


class MatmulWeightGradient:
    """grad_linear_weight of a step of one or several chunks, as weight_gradient.WeightGradient."""

    def __init__(self, out: Tensor, tokens: int, chunks: int, adds: bool = False, factor: Tensor | None = None) -> None:
        assert factor is None  # for float16 alone, whose products matmul.py does not make
        self.out, self.tokens, self.adds, self.blocks = out, tokens, adds, EVERY_BLOCK
        self.sum = out.new_zeros(out.shape, dtype=torch.float32)

    def add(self, exponentials: Tensor, rows: Tensor, valid_tokens: ValidTokens) -> None:
        if self.blocks.number is not None:
            raise NotImplementedError(UNSUPPORTED.format(what="a sparse gradient"))
        n, valid = rows.shape[0], is_valid(valid_tokens, rows.shape[0])
        self.sum += product(torch.where(valid, exponentials, 0).T, torch.where(valid, rows, 0))
        if self.adds:
            self.out += self.sum
            self.sum.zero_()
        elif valid_tokens.start + n == self.tokens:
            self.out.copy_(self.sum)


def launch_input_gradient(
    out: Tensor,  # (n, D) rows of grad_input
    exponentials: Tensor,  # (n, V)
    linear_weight: Tensor,  # (V, D)
    finish: Finish,
    valid_tokens: ValidTokens,
    memory: Tensor,
    blocks: ClassBlocks = EVERY_BLOCK,
    by_ranges: bool = False,
) -> None:
    for what, asked in (("a sparse gradient", blocks.number is not None), ("batch_invariant", by_ranges)):
        if asked:
            raise NotImplementedError(UNSUPPORTED.format(what=what))
    (n, hidden), valid = out.shape, is_valid(valid_tokens, out.shape[0])
    found = product(torch.where(valid, exponentials, 0), linear_weight)
    if finish.row_factor is not None:
        found *= finish.row_factor[:, None]
    if finish.column is not None:
        here = valid[:, 0] & (finish.column >= 0)
        column = torch.where(here, finish.column, 0)
        found += torch.where(here, finish.residual, 0.0)[:, None] * linear_weight[column].float()
    found = torch.where(valid, found, 0.0)
    if finish.sums is not None:
        token = torch.where(valid[:, 0], valid_tokens.order, 0)
        of_columns = (found * finish.input[token].float()).split(SUMMED.value, 1)
        finish.sums.copy_(torch.stack([part.sum(1) for part in of_columns], 1))
        assert finish.sums.shape[1] == cdiv(hidden, SUMMED.value) and n == finish.sums.shape[0]
    out.copy_(found)
