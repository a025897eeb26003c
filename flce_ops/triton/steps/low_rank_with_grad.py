"""The CUDA implementation of linear_cross_entropy_low_rank_with_grad: with_grad.py for a frozen head with a low-rank
pair.

Its chunks are those of one_pass_step.py, with two GEMMs and three products of rank r:

    rows, h = the chunk's valid tokens, and their rows of low_rank_input
    E = exp(rows @ W.T + h @ B.T - reference)       both products in the same tile                    low_rank_pair.py
    grad_input           = c (E @ W)
    grad_low_rank_weight += E.T @ (c h)             this and the next product: a step with operands h and B
    grad_low_rank_input  = c (E @ B)

The last two products are limited by memory bandwidth: each reads E once.
"""

import torch
from torch import Tensor

from ... import meta
from ...math.options import LowRankOperands, Operands
from ...math.reduction import Reduction, class_weight_of
from ...meta.arguments import LowRankWithGrad, WithGrad
from ...meta.call import takes
from ...objectives.cross_entropy import CrossEntropy
from ...support.target_range import assert_in_range
from ..gemm.input_gradient import ClassSlices
from ..gemm.split_k import MOST_SPLITS
from ..rows.copy_rows import launch_copy_rows
from ..rows.finish_rows import FinishedRows, Tokens
from ..rows.sum_losses import launch_sum_losses
from ..rows.valid_tokens import compact_tokens
from .chunking import best_chunking, problem_of
from .chunks import contiguous, record_chunks, small_bytes
from .gradients import finish_gradients, wanted_gradients
from .low_rank_pair import Pair, padded_rank
from .one_pass_step import OnePassStep, StepTokens

# N tokens, n rows of a chunk, D hidden, V vocabulary, r rank of the pair


class LowRankStep(OnePassStep):
    def __init__(
        self,
        *arguments,  # arguments of OnePassStep, for the head
        of_pair: OnePassStep,  # its operands are low_rank_input and low_rank_weight
    ) -> None:
        super().__init__(*arguments)
        self.of_pair = of_pair
        self.pair = Pair(*of_pair.operands[:2])

    def exponentiate(
        self, chunk: slice, rows: Tensor, pieces: ClassSlices, scratch: Tensor | None = None
    ) -> tuple[Tokens, FinishedRows]:
        input, grad_input = self.pair.input, self.of_pair.grad_input
        # h is stored in the memory of its gradient, which the chunk writes last
        own = input.new_empty(rows.shape[0], input.shape[1]) if grad_input is None else grad_input[chunk]
        launch_copy_rows(input, own, self.valid_tokens.of(chunk))
        self.pair_of_chunk = self.pair._replace(input=own)
        return super().exponentiate(chunk, rows, pieces, scratch)

    def write_input(
        self, chunk: slice, tokens: Tokens, pieces: ClassSlices, finished: FinishedRows, product: Tensor
    ) -> None:
        super().write_input(chunk, tokens, pieces, finished, product)
        rows = self.pair_of_chunk.input
        self.of_pair.add_to_weight(tokens, rows, pieces, finished)
        # at most as much memory as the sums per tile took, which are not needed any more
        numbers = min(MOST_SPLITS.value * rows.numel(), small_bytes() // 4)
        own = self.float32(numbers)
        self.of_pair.write_input(chunk, tokens, pieces, finished, own)


@takes(LowRankWithGrad)
def launch_low_rank_with_grad(call: LowRankWithGrad) -> meta.Outputs:
    outputs = loss, losses, grad_input, *of_pair, grad_bias = meta.outputs(call)
    input, linear_weight, pair_input, pair_weight, target, linear_bias, weight = call.operands
    target, linear_bias, row_scale = contiguous(target, linear_bias, call.reduction.row_scale)
    pair = padded_rank(pair_input), padded_rank(pair_weight)
    made = [padded_rank(grad) if wanted else grad for grad, wanted in zip(of_pair, call.output_mask[1:3])]
    call.operands = LowRankOperands(input, linear_weight, *pair, target, linear_bias)
    call.reduction = Reduction(row_scale, call.reduction.denominator)
    in_range = target.new_empty((), dtype=torch.bool)
    with torch.cuda.device_of(input):
        target_weight = None if weight is None else class_weight_of(target, weight, torch.float32)
        fresh = in_range, loss, losses, grad_input, *made, grad_bias
        chunks = low_rank_step(call, target_weight, *fresh)
        assert_in_range(in_range, target, linear_weight.shape[0], call.ignore_index)
    for grad, of_even_rank in zip(of_pair, made):
        if of_even_rank is not grad:
            grad.copy_(of_even_rank[:, : pair_weight.shape[1]])
    record_chunks(call, linear_weight, chunks)
    return outputs


def low_rank_step(
    call: LowRankWithGrad,
    target_weight: Tensor | None,  # (N,) float32, w_y
    in_range: Tensor,  # () bool, out
    *outputs: Tensor,  # the operator's results
) -> list[slice]:
    """Runs the step and returns its chunks."""
    loss, losses, grad_input, grad_pair_input, grad_pair_weight, grad_bias = outputs
    input, linear_weight, pair_input, pair_weight, target, *_ = call.operands
    want_input, want_pair_input, want_pair_weight, want_bias = call.output_mask
    reduction, num_classes = call.reduction, linear_weight.shape[0]
    mask = [want_input, False, want_bias]
    problem = problem_of(input.shape[0], linear_weight, mask)
    chunking = best_chunking(problem._replace(recompute_below=0))  # never recomputes: backward's kernels take no pair
    valid_tokens, place = compact_tokens(target, call.ignore_index, num_classes, in_range)
    objective = CrossEntropy(call.loss, None, target_weight, num_classes)
    per_token = StepTokens(objective, reduction, losses)
    nothing = input.new_empty(0)
    of_head = [grad_input, nothing, grad_bias]
    of_pair = [grad_pair_input, grad_pair_weight, nothing]
    gradients = wanted_gradients(of_head, mask)
    pair_gradients = wanted_gradients(of_pair, [want_pair_input, want_pair_weight, False])
    head = WithGrad.like(call, operands=call.operands.head)
    pair = WithGrad.like(call, operands=Operands(pair_input, pair_weight, target))
    pair_step = OnePassStep(pair, valid_tokens, per_token, pair_gradients, chunking)
    step = LowRankStep(head, valid_tokens, per_token, gradients, chunking, of_pair=pair_step)
    step.run_chunks(chunking.chunks)
    finish_gradients(of_head, gradients, valid_tokens, place)
    finish_gradients(of_pair, pair_gradients, valid_tokens, place)
    launch_sum_losses(losses, reduction, valid_tokens.total, loss)
    return chunking.chunks
