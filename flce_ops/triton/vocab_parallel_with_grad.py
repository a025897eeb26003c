"""CUDA kernel of linear_cross_entropy_vocab_parallel_with_grad: an exchange between the GEMMs of each chunk.

    E = exp(z - reference) of this rank's classes, row sums             Triton GEMM    triton/exponentials.py
    two numbers a row, three with smoothing, two more with argmax       all_gather
    losses, row factors c, the target's entry of E                      one kernel     triton/finish_shard_rows.py
    grad_linear_weight += E.T @ (c input),  grad_input = c (E @ linear_weight)         as in triton/with_grad.py

Chunks are as large as the workspace allows, so there are few exchanges.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.math.reduction import Reduction
from flce_ops.math.shards import Exchange, argmax_of_shards, shard_rows, statistics_of_shard
from flce_ops.math.sparse_gradient import Shard
from flce_ops.meta.arguments import VocabParallelWithGrad
from flce_ops.meta.call import takes
from flce_ops.support.target_range import assert_in_range
from flce_ops.triton.chunks import record_chunks, with_contiguous_vectors
from flce_ops.triton.cut import cut_shard
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.finish_shard_rows import launch_finish_shard_rows, launch_shard_numbers
from flce_ops.triton.gradients import finish_gradients, wanted_gradients
from flce_ops.triton.kept_tokens import keep_tokens
from flce_ops.triton.one_pass_step import OnePassStep, StepTokens
from flce_ops.triton.row_loss import RowLoss
from flce_ops.triton.row_statistics import sum_pairs
from flce_ops.triton.smoothing import SmoothingTerms
from flce_ops.triton.sparse_run import is_sparse, run_sparse, sparse_notes
from flce_ops.triton.sum_losses import launch_sum_losses

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


@takes(VocabParallelWithGrad)
def launch_vocab_parallel_with_grad(call: VocabParallelWithGrad) -> meta.Outputs:
    outputs = meta.outputs(call)
    loss, losses, *grads, columns = outputs[:6]
    call.operands = operands = with_contiguous_vectors(call.operands)
    input, linear_weight, target, _, weight = operands
    reduction = Reduction(call.row_scale.contiguous())
    asked, logit_options, vocab_start = call.statistics, call.logits, call.vocab_start
    largest_shard = shard_rows(call.vocab_size, call.ranks)
    with torch.cuda.device_of(input):
        in_range = target.new_empty((), dtype=torch.bool)
        kept, place = keep_tokens(target, call.ignore_index, call.vocab_size, in_range)
        assert_in_range(in_range, target, call.vocab_size, call.ignore_index)
        exchange = Exchange(target, weight, call.group, call.ranks, call.vocab_size, call.loss, torch.float32)
        class_weight = None if weight is None else weight.float()
        row_loss = RowLoss(None if class_weight is None else class_weight.sum(), call.vocab_size, call.loss)
        smoothing = None
        if call.loss.label_smoothing:
            here = slice(vocab_start, vocab_start + linear_weight.shape[0])
            own_weight = None if class_weight is None else class_weight[here]
            smoothing = SmoothingTerms(operands, own_weight, kept, reduction, row_loss, logit_options.logit_scale)

        def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
            numbers = launch_shard_numbers(tokens, sums)
            if asked.argmax:
                numbers[-2], numbers[-1] = sums.max_logit, sums.argmax + vocab_start
            gathered = exchange.gather(numbers)
            finished = launch_finish_shard_rows(
                gathered, tokens, sums, row_loss, input.dtype, logit_scale=logit_options.logit_scale
            )
            return finished, argmax_of_shards(gathered[:, -2], gathered[:, -1]) if asked.argmax else None

        own = statistics_of_shard(asked, losses)
        statistics = own._replace(argmax=columns if asked.argmax else None)
        per_token = StepTokens(exchange.target_weight, reduction, losses, statistics)
        gradients = wanted_gradients(grads, call.output_mask)
        if is_sparse(call):
            shard = Shard(vocab_start, largest_shard, exchange.gather)
            chunks = run_sparse(call, kept, per_token, gradients, finish_rows, shard)
        else:
            cut = cut_shard(input, largest_shard, call.output_mask, sum_pairs=sum_pairs(asked))
            chunks = cut.chunks
            step = OnePassStep(
                operands,
                logit_options,
                kept,
                per_token,
                gradients,
                cut,
                finish_rows,
                smoothing,
                vocab_start=vocab_start,
                vocab_size=call.vocab_size,
            )
            step.run_chunks(chunks)
        if smoothing is not None and gradients.bias_sum is not None:
            smoothing.add_to_bias(gradients.bias_sum)
        exchange.finish_statistics(asked, own, target != call.ignore_index, outputs[6:])
        finish_gradients(grads, gradients, kept, place)
        launch_sum_losses(losses, reduction, kept.total, loss)
    record_chunks(call, linear_weight, chunks, *sparse_notes(call))
    return outputs
