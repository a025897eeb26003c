"""linear_cross_entropy_low_rank_with_grad: a head with a frozen weight, and a low-rank pair beside it.

    for each chunk:    product = x @ W.T + h @ B.T        h: low_rank_input (n, r), B: low_rank_weight (V, r)
                       G from the product                  as in with_grad.py
                       dx = G @ W,  dh = G @ B,  dB += G.T @ h

With class_scale c, the product is c_j (x W_j + h B_j), and the last line has c_j G_ij in place of G_ij. The gradient of
the scale is

                       dc_j += sum_i G_ij (x_i W_j + h_i B_j)

This takes two GEMM passes of 2NDV and three of 2NrV. It makes no (V, D) matrix beside W, neither W + B A nor its
gradient.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..math.options import TokenStatistics
from ..math.precision import accumulation_dtype
from ..meta.arguments import LowRankWithGrad
from ..support.readable import copy_bytes
from .chunks import chunk_products
from .gradients import GradientAccumulator
from .logits import upcast
from .valid_tokens import kernel_of
from .with_grad import loss_and_gradients, rows_of_call, rows_of_chunk

# N tokens, n rows of a chunk, D hidden, V vocabulary, r rank of the pair


@kernel_of(LowRankWithGrad, checks_target=True)
def low_rank_with_grad(call: LowRankWithGrad, outputs: Sequence[Tensor]) -> None:
    loss, losses, *grads = outputs
    input, linear_weight, pair_input, pair_weight, *_ = call.operands
    head = call.operands.head
    reserved = copy_bytes(linear_weight) + 4 * pair_weight.numel()  # and the float32 sum of low_rank_weight's gradient
    # the gradient of class_scale needs the unscaled product beside u
    step = rows_of_chunk(call, head, False, reserved=reserved, matrices_beside=int(call.output_mask[4]))
    gradients = PairGradients(call, grads, step)
    scaled = call.operands.class_scale is not None
    products = chunk_products(call, input, linear_weight, None if scaled else head.linear_bias, step)
    products = with_pair(products, pair_input, pair_weight)
    of_block = gradients.scaled if scaled else None
    of_tokens = rows_of_call(call, head, losses, TokenStatistics())
    loss.copy_(loss_and_gradients(call, of_tokens, products, gradients, of_block))


def with_pair(
    products: Iterator[tuple[slice, Tensor]], pair_input: Tensor, pair_weight: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    for rows, product in products:
        if product.dtype == pair_weight.dtype:
            product.addmm_(pair_input[rows], pair_weight.T)
        else:  # otherwise the product is float32, as cuBLAS returns it
            torch.addmm(product, pair_input[rows], pair_weight.T, out_dtype=product.dtype, out=product)
        yield rows, product


class PairGradients:
    """An Accumulator for the gradients of input and linear_bias, of the pair, and of the class scale."""

    def __init__(self, call: LowRankWithGrad, grads: Sequence[Tensor], rows: int) -> None:
        grad_input, grad_pair_input, grad_pair_weight, grad_bias, self.grad_scale = grads
        want_input, want_pair_input, want_pair_weight, want_bias, want_scale = call.output_mask
        input, linear_weight, pair_input, pair_weight, _, linear_bias, _, class_scale = call.operands
        accumulate = accumulation_dtype(input.dtype)
        self.class_scale = self.class_factor = upcast(class_scale, accumulate)
        self.gradient_scale = None
        if class_scale is not None and input.dtype == torch.float16:
            self.gradient_scale = scale_of_gradient(call, self.class_scale)
            self.class_factor = self.class_scale * self.gradient_scale
        self.of_products = [grad_input, grad_pair_input, grad_pair_weight]
        self.scale_sum = torch.zeros_like(self.grad_scale, dtype=accumulate) if want_scale else None
        self.linear_bias = upcast(linear_bias, accumulate)
        self.unscaled = grad_input  # (n, V), the product of the current block
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

    def scaled(self, block: Tensor) -> Tensor:  # (n, V), u in the accumulation dtype
        u = block.to(self.class_scale.dtype)
        if self.scale_sum is not None:
            # `block` keeps the product until round_block writes G there
            self.unscaled = block.clone() if u is block else block
        u *= self.class_scale
        return u if self.linear_bias is None else u.add_(self.linear_bias)

    def add_bias(self, grad_logits: Tensor) -> None:
        self.head.add_bias(grad_logits)
        if self.scale_sum is not None:
            self.scale_sum += (self.unscaled * grad_logits).sum(0)

    def round_block(self, block: Tensor, grad_logits: Tensor) -> None:
        if self.class_scale is not None:
            grad_logits.mul_(self.class_factor)
        self.head.round_block(block, grad_logits)

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        rounded = grad_logits.to(self.head.input.dtype)
        self.head.add_products(rows, rounded)
        self.pair.add_products(rows, rounded)

    def finish(self) -> None:
        self.head.finish()
        self.pair.finish()
        if self.gradient_scale is not None:
            for gradient in self.of_products:
                gradient.div_(self.gradient_scale)
        if self.scale_sum is not None:
            self.grad_scale.copy_(self.scale_sum)


def scale_of_gradient(call: LowRankWithGrad, class_scale: Tensor) -> Tensor:  # ()
    """A power of two by which c_j G_ij is multiplied, so that it and the sums of its products are in float16's range.

    Here the product c_j G_ij is rounded, while plain torch rounds G and c_j W_j separately. In a mean with c_j = 0.01,
    say, entries of c_j G_ij are below float16's smallest normal number. The scale makes up for a small c_j, unless G is
    large. A row's |G_ij| sum to at most 2 |l_i|. Since the scale is divided by the sum of row scales, no product is
    larger than it would be with c_j = 1 in a mean.
    """
    valid = call.operands.target != call.ignore_index
    scale = call.reduction.scale_of_tokens(valid, class_scale.dtype)
    largest = class_scale.abs().amax() * scale.abs().sum().clamp(min=1.0)
    return torch.exp2(-largest.log2().ceil()).clamp(1.0, 2.0**24).nan_to_num(1.0)
