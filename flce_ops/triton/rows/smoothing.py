"""Label smoothing without a softcap, as vectors: it adds no work to the epilogue of the logits GEMM, and none on G.

Label smoothing reads the logit sum of a row, which is linear in the token:

    sum_j w_j z_ij = s (x_i . wW + wb)        wW = sum_j w_j W_j,  wb = sum_j w_j b_j        made in gather_tokens.py

It adds the rank-1 matrix  m_i w_j  to G, where m_i = -g_i s eps / V is s times the derivative by the row's logit sum.
The products of a rank-1 matrix are outer products, so G need not contain it:

    grad_input += m wW        grad_linear_weight += w (m @ input)        grad_linear_bias += w sum(m)

So a step reads linear_weight once more, for wW. A forward pass without gradients needs only the logit sum, so it sums
the logits in the epilogue instead. That takes 0.04 of 7.5 ms (H200, 4096x4096x151936), and reading linear_weight for wW
would take 0.29 ms. Sums over classes and over tokens are float32 in a fixed order (column_sums.py).
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions, Operands
from ...math.reduction import Reduction
from ...objectives.in_triton import number
from ...support.integers import cdiv
from ..kernel import Kernel
from .after_chunks import scale_of_rows
from .column_sums import weighted_column_sum
from .valid_tokens import ValidTokens

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank


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
