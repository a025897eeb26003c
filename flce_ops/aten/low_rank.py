"""Kernel of linear_cross_entropy_low_rank_with_grad: a head whose weight is frozen, and a pair of low rank beside it.

    for each chunk:    product = x @ W.T + h @ B.T        h: low_rank_input (n, r), B: low_rank_weight (V, r)
                       G of it                            as in with_grad.py
                       dx = G @ W,  dh = G @ B,  dB += G.T @ h

With class_scale c the product is c_j (x W_j + h B_j), and c_j G_ij stands for G_ij in the last line:

                       dc_j += sum_i G_ij (x_i W_j + h_i B_j)

Two GEMM passes of 2NDV and three of 2NrV, and no matrix of (V, D) beside W: neither W + B A nor its gradient.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flce_ops.aten.chunks import chunk_products
from flce_ops.aten.gradients import GradientAccumulator
from flce_ops.aten.kept_tokens import ZERO, on_kept_tokens
from flce_ops.aten.logits import upcast
from flce_ops.aten.with_grad import loss_and_gradients, rows_of_chunk
from flce_ops.math.options import TokenStatistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta import low_rank
from flce_ops.meta.arguments import LowRankWithGrad
from flce_ops.meta.call import takes
from flce_ops.support.readable import copy_bytes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary, r rank of the pair


@takes(LowRankWithGrad)
def low_rank_with_grad(call: LowRankWithGrad) -> low_rank.Outputs:
    outputs = low_rank.with_grad_outputs(call)
    check_target_range(call.operands.target, call.operands.linear_weight.shape[0], call.ignore_index)
    on_kept_tokens(low_rank_with_grad_of_rows, call, outputs, (None, ZERO, ZERO, ZERO, None, None, None))
    return outputs


def low_rank_with_grad_of_rows(call: LowRankWithGrad, outputs: Sequence[Tensor]) -> None:
    loss, losses, *grads = outputs
    input, linear_weight, pair_input, pair_weight, *_ = call.operands
    head = call.operands.head
    reserved = copy_bytes(linear_weight) + 4 * pair_weight.numel()  # a float32 sum of its gradient
    # beside the product it is kept unscaled
    beside = int(call.output_mask[4])
    step = rows_of_chunk(call, head, False, reserved=reserved, matrices_beside=beside, matrices=beside)
    gradients = PairGradients(call, grads, step)
    products = gradients.scaled(with_pair(chunk_products(call, input, linear_weight, step), pair_input, pair_weight))
    loss.copy_(loss_and_gradients(call, head, products, gradients, losses, TokenStatistics()))


def with_pair(
    products: Iterator[tuple[slice, Tensor]], pair_input: Tensor, pair_weight: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    for rows, product in products:
        if product.dtype == pair_weight.dtype:
            product.addmm_(pair_input[rows], pair_weight.T)
        else:  # cuBLAS's accumulator
            torch.addmm(product, pair_input[rows], pair_weight.T, out_dtype=product.dtype, out=product)
        yield rows, product


class PairGradients:
    """Where the G of chunks goes: gradients of input and linear_bias, of the pair, and of the class scale."""

    def __init__(self, call: LowRankWithGrad, grads: Sequence[Tensor], rows: int) -> None:
        grad_input, grad_pair_input, grad_pair_weight, grad_bias, self.grad_scale = grads
        want_input, want_pair_input, want_pair_weight, want_bias, want_scale = call.output_mask
        input, linear_weight, pair_input, pair_weight, *_, class_scale = call.operands
        accumulate = accumulation_dtype(input.dtype)
        self.class_scale = upcast(class_scale, accumulate)
        self.scale_sum = torch.zeros_like(self.grad_scale, dtype=accumulate) if want_scale else None
        self.unscaled = grad_input  # (n, V), the product of the chunk's rows that have no G yet
        nothing = grad_input.new_empty(0)
        self.head = GradientAccumulator(
            input, linear_weight, [grad_input, nothing, grad_bias], [want_input, False, want_bias], rows
        )
        self.pair = GradientAccumulator(
            pair_input,
            pair_weight,
            [grad_pair_input, grad_pair_weight, nothing],
            [want_pair_input, want_pair_weight, False],
            rows,
        )

    def scaled(self, products: Iterator[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
        for rows, product in products:
            if self.scale_sum is not None:
                self.unscaled = product.clone()
            yield rows, product if self.class_scale is None else product.mul_(self.class_scale)

    def add_bias(self, grad_logits: Tensor) -> None:
        self.head.add_bias(grad_logits)
        if self.scale_sum is not None:
            rows = grad_logits.shape[0]
            self.scale_sum += (self.unscaled[:rows] * grad_logits).sum(0)
            self.unscaled = self.unscaled[rows:]

    def round_block(self, block: Tensor, grad_logits: Tensor) -> None:
        if self.class_scale is not None:
            grad_logits.mul_(self.class_scale)
        self.head.round_block(block, grad_logits)

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        rounded = grad_logits.to(self.head.input.dtype)
        self.head.add_products(rows, rounded)
        self.pair.add_products(rows, rounded)

    def finish(self) -> None:
        self.head.finish()
        self.pair.finish()
        if self.scale_sum is not None:
            self.grad_scale.copy_(self.scale_sum)
