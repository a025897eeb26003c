"""one_pass_step.py with a low-rank pair beside a head that is frozen: two GEMMs, and three products of rank r.

    rows, h = the chunk's kept tokens, and their rows of low_rank_input
    E = exp(rows @ W.T + h @ B.T - reference)       the second product in the same tile              low_rank_pair.py
    grad_input           = c (E @ W)
    grad_low_rank_weight += E.T @ (c h)             those of a step whose operands are h and B
    grad_low_rank_input  = c (E @ B)

The last two are bound by the memory: each reads E once. With a class scale E is stored times it, and so are all three.
"""

import torch
from torch import Tensor

from flce_ops.triton.gemm.input_gradient import Pieces
from flce_ops.triton.gemm.parts import MOST_PARTS
from flce_ops.triton.rows.columns import weighted_column_sum
from flce_ops.triton.rows.copy_rows import launch_copy_rows
from flce_ops.triton.rows.finish_rows import FinishedRows, Tokens
from flce_ops.triton.steps.chunks import small_bytes
from flce_ops.triton.steps.class_scale_gradient import gradient_of_scale, logit_products
from flce_ops.triton.steps.low_rank_pair import Pair
from flce_ops.triton.steps.one_pass_step import OnePassStep

# N tokens, n rows of a chunk, D hidden, V vocabulary, r rank of the pair


class LowRankStep(OnePassStep):
    def __init__(
        self,
        *arguments,  # of OnePassStep, for the head
        of_pair: OnePassStep,  # low_rank_input and low_rank_weight are its operands
        class_scale: Tensor | None,  # (V,) float32
        want_scale: bool,
    ) -> None:
        super().__init__(*arguments)
        self.of_pair = of_pair
        self.pair = Pair(*of_pair.operands[:2], class_scale)
        # sums over tokens of c_j G_ij, and logit_products
        self.gradient_sum = self.product_sum = None
        if class_scale is not None and want_scale:
            self.gradient_sum, self.product_sum = torch.zeros(2, *class_scale.shape, device=class_scale.device).unbind()

    def exponentiate(
        self, chunk: slice, rows: Tensor, pieces: Pieces, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        input, grad_input = self.pair.input, self.of_pair.grad_input
        # they wait in the rows of their gradient
        own = input.new_empty(rows.shape[0], input.shape[1]) if grad_input is None else grad_input[chunk]
        launch_copy_rows(input, own, self.kept.of(chunk))
        self.pair_of_chunk = self.pair._replace(input=own)
        tokens, finished = super().exponentiate(chunk, rows, pieces, scratch)
        if self.product_sum is not None:
            ((_, piece),), factor = pieces, finished.weight_factor
            operands = rows, self.operands.linear_weight, self.pair_of_chunk
            self.product_sum += logit_products(piece, *operands, factor, self.reference, tokens)
            if self.operands.linear_bias is not None:
                self.gradient_sum += weighted_column_sum(piece, factor, tokens.kept)
        return tokens, finished

    def write_input(
        self, chunk: slice, tokens: Tokens, pieces: Pieces, finished: FinishedRows, product: Tensor
    ) -> None:
        super().write_input(chunk, tokens, pieces, finished, product)
        rows = self.pair_of_chunk.input
        self.of_pair.add_to_weight(tokens, rows, pieces, finished)
        # the sums per tile, which were as large, are not needed any more
        numbers = min(MOST_PARTS.value * rows.numel(), small_bytes() // 4)
        own = self.float32(numbers)
        self.of_pair.write_input(chunk, tokens, pieces, finished, own)

    def scale_gradient(self) -> Tensor:  # (V,) float32
        sums, logit_scale = (self.product_sum, self.gradient_sum), self.logit_options.logit_scale
        return gradient_of_scale(*sums, self.pair.class_scale, self.operands.linear_bias, logit_scale)
