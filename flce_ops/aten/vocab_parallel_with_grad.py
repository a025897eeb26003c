"""ATen kernel of linear_cross_entropy_vocab_parallel_with_grad: flce_ops/distributed/one_pass.py says what it does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import product_is_rounded, row_chunks
from flce_ops.aten.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.aten.kept_tokens import on_kept_tokens
from flce_ops.aten.logits import (
    add_target_and_sum,
    apply_slope,
    chunk_logits_with_slope,
    weighted_logits,
)
from flce_ops.aten.row_statistics import exponentiate_with_statistics, extra_matrices
from flce_ops.aten.sparse_gradients import SparseAccumulator, draws_of, matrices_for_keeping, needs_exact
from flce_ops.math.shards import Exchange, shard_rows, statistics_of_shard, target_columns
from flce_ops.math.sparse_gradient import Draws, Shard
from flce_ops.meta.arguments import VocabParallelWithGrad
from flce_ops.meta.call import takes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


@takes(VocabParallelWithGrad)
def vocab_parallel_with_grad(call: VocabParallelWithGrad) -> meta.Outputs:
    outputs = meta.outputs(call)
    check_target_range(call.operands.target, call.vocab_size, call.ignore_index)
    # all ranks see the same targets, so they keep the same rows and meet in the same exchanges
    on_kept_tokens(vocab_parallel_with_grad_of_rows, call, outputs, call.fills, *draws_of(call))
    return outputs


def vocab_parallel_with_grad_of_rows(
    call: VocabParallelWithGrad, outputs: Sequence[Tensor], draws: Draws | None = None
) -> None:
    loss, losses, *grads, argmax, _, _, _, _ = outputs
    input, linear_weight, target, linear_bias, weight = call.operands
    vocab_start, output_mask = call.vocab_start, call.output_mask
    own = linear_weight.shape[0]
    valid, hit, column = target_columns(target, call.ignore_index, vocab_start, own)
    accumulate = losses.dtype
    scale = torch.where(valid, call.row_scale, 0.0).to(accumulate)
    exchange = Exchange(target, weight, call.group, call.ranks, call.vocab_size, call.loss, accumulate)
    own_weight = None if weight is None else weight[vocab_start : vocab_start + own].to(accumulate)
    own_statistics = statistics_of_shard(call.statistics, losses)
    largest_shard = shard_rows(call.vocab_size, call.ranks)
    matrices = product_is_rounded(input) + (call.logits.softcap is not None) + extra_matrices(call.statistics)
    matrices += needs_exact(call) + matrices_for_keeping(call)
    step = rows_beside_gradients(input, largest_shard, output_mask[1], matrices=matrices)
    if draws is None:
        gradients = GradientAccumulator(input, linear_weight, grads, output_mask, step)
    else:
        gradients = SparseAccumulator(call, draws, grads, step, Shard(vocab_start, largest_shard, exchange.gather))
    for rows in row_chunks(call, input, step):
        logits, slope = chunk_logits_with_slope(input[rows], linear_weight, linear_bias, call.logits)
        per_shard = [torch.where(hit[rows], logits.gather(1, column[rows]).squeeze(1), 0.0)]
        if call.loss.label_smoothing:
            per_shard.append(weighted_logits(logits, own_weight))
        own_largest = None
        if call.statistics.argmax:
            max_logit, own_column = logits.max(1)
            own_largest = (max_logit, own_column + vocab_start)
        row_max, row_sum = exponentiate_with_statistics(logits, own_statistics, rows, call.vocab_size)
        own_lse = row_max + row_sum.log()
        lse, share, target_logit, logit_sum, column_of_largest = exchange.whole_rows([own_lse, *per_shard], own_largest)
        if call.statistics.argmax:
            argmax[rows] = column_of_largest
        terms = exchange.terms.of(rows)
        losses[rows] = torch.where(valid[rows], terms.loss(target_logit, lse, logit_sum), 0.0)
        # E = exp(z - row_max) becomes exp(z - lse); a bias of -inf may switch off all of this rank's classes
        normalization = torch.where(row_sum > 0.0, share / row_sum, 0.0 * share)
        cotangents = terms.cotangents(target_logit, lse, scale[rows])
        grad_logits = logits.mul_((cotangents.grad_lse * normalization)[:, None])
        own_target = torch.where(hit[rows], cotangents.grad_target_logit, 0.0)
        add_target_and_sum(grad_logits, column[rows], cotangents._replace(grad_target_logit=own_target), own_weight)
        gradients.add_bias(apply_slope(grad_logits, slope))
        if isinstance(gradients, SparseAccumulator):
            gradients.keep(grad_logits, cotangents.grad_lse, column[rows], rows, rows)
        gradients.add_products(rows, grad_logits)
        del logits, grad_logits, slope  # before the next chunk is allocated
    gradients.finish()
    exchange.finish_statistics(call.statistics, own_statistics, valid, outputs[6:])
    torch.sum(call.row_scale * losses, dim=0, out=loss)
