"""linear_cross_entropy_low_rank_with_grad: a head with a frozen weight, and a low-rank pair beside it.

    for each chunk:    product = x @ W.T + h @ B.T        h: low_rank_input (n, r), B: low_rank_weight (V, r)
                       G from the product                  as in with_grad.py
                       dx = G @ W,  dh = G @ B,  dB += G.T @ h

This takes two GEMM passes of 2NDV and three of 2NrV. It makes no (V, D) matrix beside W, neither W + B A nor its
gradient.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..math.options import TokenStatistics
from ..meta.arguments import LowRankWithGrad
from .chunks import chunk_products
from .gradients import GradientAccumulator
from .valid_tokens import kernel_of
from .with_grad import loss_and_gradients, rows_of_call, rows_of_chunk

# N tokens, n rows of a chunk, D hidden, V vocabulary, r rank of the pair


@kernel_of(LowRankWithGrad, checks_target=True)
def low_rank_with_grad(call: LowRankWithGrad, outputs: Sequence[Tensor]) -> None:
    loss, losses, *grads = outputs
    input, linear_weight, pair_input, pair_weight, *_ = call.operands
    head = call.operands.head
    # reserves memory for the float32 sum of low_rank_weight's gradient
    step = rows_of_chunk(call, head, False, reserved=4 * pair_weight.numel())
    gradients = PairGradients(call, grads, step)
    products = chunk_products(call, input, linear_weight, head.linear_bias, step)
    products = with_pair(products, pair_input, pair_weight)
    of_tokens = rows_of_call(call, head, losses, TokenStatistics())
    loss.copy_(loss_and_gradients(call, of_tokens, products, gradients))


def with_pair(
    products: Iterator[tuple[slice, Tensor]], pair_input: Tensor, pair_weight: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    for rows, product in products:
        if product.dtype == pair_weight.dtype:
            product.addmm_(pair_input[rows], pair_weight.T)
        else:  # otherwise the product is float32, as cuBLAS returns it
            torch.addmm(product, pair_input[rows], pair_weight.T, out_dtype=product.dtype, out=product)
        yield rows, product


class PairGradients(GradientAccumulator):
    """The gradients of input and linear_bias, and of the pair."""

    def __init__(self, call: LowRankWithGrad, grads: Sequence[Tensor], rows: int) -> None:
        grad_input, grad_pair_input, grad_pair_weight, grad_bias = grads
        want_input, want_pair_input, want_pair_weight, want_bias = call.output_mask
        input, linear_weight, pair_input, pair_weight, *_ = call.operands
        nothing = grad_input.new_empty(0)
        super().__init__(input, linear_weight, [grad_input, nothing, grad_bias], [want_input, False, want_bias], rows)
        of_pair, mask = [grad_pair_input, grad_pair_weight, nothing], [want_pair_input, want_pair_weight, False]
        self.pair = GradientAccumulator(pair_input, pair_weight, of_pair, mask, rows)

    def add_products(self, rows: slice, grad_logits: Tensor, input: Tensor | None = None) -> None:
        rounded = grad_logits.to(self.input.dtype)
        super().add_products(rows, rounded, input)
        self.pair.add_products(rows, rounded)

    def finish(self) -> None:
        super().finish()
        self.pair.finish()
