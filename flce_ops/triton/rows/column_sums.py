"""sum_i factor_i matrix_ij in float32, in a fixed order: bias gradients, sums over tiles, label smoothing.

Label smoothing without a softcap is made of such vectors: it adds no work to the epilogue of the logits GEMM, nor on G.

Label smoothing reads the logit sum of a row, which is linear in the token:

    sum_j w_j z_ij = s (x_i . wW + wb)        wW = sum_j w_j W_j,  wb = sum_j w_j b_j        made in gather_tokens.py

It adds the rank-1 matrix  m_i w_j  to G, where m_i = -g_i s eps / V is s times the derivative by the row's logit sum.
The products of a rank-1 matrix are outer products, so G need not contain it:

    grad_input += m wW        grad_linear_weight += w (m @ input)        grad_linear_bias += w sum(m)

So a step reads linear_weight once more, for wW. A forward pass without gradients needs only the logit sum, so it sums
the logits in the epilogue instead. That takes 0.04 of 7.5 ms (H200, 4096x4096x151936), and reading linear_weight for wW
would take 0.29 ms. Sums over classes and over tokens are float32 in a fixed order.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions, Operands
from ...math.weights_and_denominator import Reduction
from ...objectives.in_triton import number
from ...support.sizes import cdiv
from ..gemm.tma import load_tile, matrix_of
from ..kernel import Kernel
from .after_chunks import scale_of_rows
from .valid_tokens import ValidTokens, valid_rows

# N tokens, n rows, C columns, S slices of the rows, D hidden, V vocabulary, v of them on this rank

PROGRAMS = 1024  # about eight a multiprocessor
ROWS_AT_LEAST = 128  # rows of a slice
BLOCK_R, BLOCK_C = tl.constexpr(32), tl.constexpr(128)


@Kernel
def weighted_column_sum_kernel(
    matrix,  # (n, C)
    partial_ptr,  # (S, C) out
    n,
    C,
    rows_per_split,
    factor_ptr,  # (n,) float32
    valid_tokens,  # ValidTokens: only their rows are summed; None: all rows
    GATHERED: tl.constexpr,  # the rows are in the order of the valid tokens
):
    """One program sums BLOCK_C columns over one of S slices of the rows."""
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.program_id(1)
    first = split * rows_per_split
    rows_to_sum = n
    if valid_tokens is not None:
        rows_to_sum = valid_rows(valid_tokens, n)
    last = tl.minimum(first + rows_per_split, rows_to_sum)
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        places = rows
        if not GATHERED:
            places = tl.load(valid_tokens.order + rows, mask=rows < last, other=0)
        values = load_tile(matrix, places, cols, rows < last, cols < C).to(tl.float32)
        if factor_ptr is not None:
            values *= tl.load(factor_ptr + rows, mask=rows < last, other=0.0)[:, None]
        acc += values
    tl.store(partial_ptr + split.to(tl.int64) * C + cols, tl.sum(acc, 0), mask=cols < C)


def weighted_column_sum(
    matrix: Tensor,  # (n, C)
    factor: Tensor | None,  # (n,) float32, in the order of the valid tokens; None for 1
    valid_tokens: ValidTokens | None = None,  # only their rows are summed; None: all rows
    *,
    gathered: bool = True,  # the rows of the matrix are in the order of the valid tokens
) -> Tensor:  # (C,) float32
    """Sums in two steps, with enough slices to keep a GPU's memory busy. The second step sums the (S, C) partial sums
    in the same way.
    """
    rows, columns = matrix.shape
    column_blocks = cdiv(columns, BLOCK_C.value)
    splits = max(1, min(rows // ROWS_AT_LEAST, cdiv(PROGRAMS, column_blocks)))
    partial = torch.empty(splits, columns, dtype=torch.float32, device=matrix.device)
    of_matrix = matrix_of(matrix), partial, rows, columns, cdiv(rows, splits), factor, valid_tokens
    weighted_column_sum_kernel[(column_blocks, splits)](*of_matrix, GATHERED=gathered, num_warps=4)
    return partial[0] if splits == 1 else weighted_column_sum(partial, None)


BLOCK = tl.constexpr(1024)  # tokens of a program


class ClassSum(NamedTuple):
    """The vector whose dot product with a token is its logit sum, and a constant, in float32. Passed to kernels as one
    argument.
    """

    weight: Tensor  # (D,) wW
    bias: Tensor | None  # (1,) wb


@Kernel
def logit_sum_slopes_kernel(
    valid_tokens,  # ValidTokens, of all tokens
    reduction,  # Reduction
    out_ptr,  # (N,) out: m, in the order of the valid tokens, with zeros after them
    N,
    d_sum,  # the derivative of a loss by its logit sum
    logit_options,  # LogitOptions
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(valid_tokens.total)
    token = tl.load(valid_tokens.order + i, mask=mask, other=0)
    slopes = scale_of_rows(reduction, valid_tokens, token, mask) * (d_sum * number(logit_options.logit_scale, 1.0))
    tl.store(out_ptr + i, tl.where(mask, slopes, 0.0), mask=i < N)


class SmoothingTerms:
    def __init__(
        self,
        operands: Operands,
        class_weight: Tensor | None,  # (v,) float32
        valid_tokens: ValidTokens,
        reduction: Reduction,
        d_sum: float,  # the derivative of a loss by its logit sum
        logit_options: LogitOptions,
    ) -> None:
        self.input, self.valid_tokens, self.class_weight = operands.input, valid_tokens, class_weight
        bias, tokens = operands.linear_bias, operands.input.shape[0]
        self.class_sum = ClassSum(
            weighted_column_sum(operands.linear_weight, class_weight),
            None if bias is None else weighted_column_sum(bias.view(-1, 1), class_weight),
        )
        self.slopes = operands.input.new_empty(tokens, dtype=torch.float32)  # (N,), m
        of_tokens = valid_tokens, reduction, self.slopes, tokens, d_sum, logit_options
        logit_sum_slopes_kernel[(cdiv(tokens, BLOCK.value),)](*of_tokens, num_warps=4)

    def input_terms(self, valid_tokens: ValidTokens) -> tuple[Tensor, Tensor]:
        """Two vectors whose outer product is added to the rows of `valid_tokens` in grad_input."""
        return self.slopes[valid_tokens.start : valid_tokens.start + valid_tokens.order.shape[0]], self.class_sum.weight

    def weight_terms(self) -> tuple[Tensor | None, Tensor]:
        """Two vectors whose outer product is added to grad_linear_weight. A first vector of None stands for ones."""
        return self.class_weight, weighted_column_sum(self.input, self.slopes, self.valid_tokens, gathered=False)

    def add_to_bias(self, grad_bias: Tensor) -> None:
        total = self.slopes.sum()
        grad_bias += total if self.class_weight is None else total * self.class_weight
