"""ATen kernel of linear_cross_entropy_vocab_parallel_with_grad: flce_ops/distributed/one_pass.py says what it does."""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import (
    product_is_rounded,
    row_chunks,
)
from flce_ops.aten.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.aten.logits import (
    add_target_and_sum,
    apply_slope,
    chunk_logits_with_slope,
    exponentiate_rows,
    weighted_logits,
)
from flce_ops.math.shards import Exchange, shard_rows, target_columns
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


def vocab_parallel_with_grad(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (v, D)
    target: Tensor,  # (N,)
    linear_bias: Tensor | None,  # (v,)
    weight: Tensor | None,  # (V,)
    row_scale: Tensor,  # (N,)
    *,
    group: str,
    ranks: int,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: Tensor | None = None,  # ()
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
    output_mask: list[bool],
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    loss, losses, *grads, largest = meta.vocab_parallel_with_grad_outputs(
        input, linear_weight, target, linear_bias, weight, row_scale, output_mask=output_mask, argmax=argmax
    )
    own = linear_weight.shape[0]
    check_target_range(target, vocab_size, ignore_index)
    valid, hit, column = target_columns(target, ignore_index, vocab_start, own)
    accumulate = meta.accumulation_dtype(input.dtype)
    scale = torch.where(valid, row_scale, 0.0).to(accumulate)
    exchange = Exchange(target, weight, group, ranks, vocab_size, label_smoothing, z_loss, accumulate)
    own_weight = None if weight is None else weight[vocab_start : vocab_start + own].to(accumulate)
    matrices = product_is_rounded(input) + (softcap is not None)
    step = rows_beside_gradients(input, shard_rows(vocab_size, ranks), output_mask[1], matrices=matrices)
    gradients = GradientAccumulator(input, linear_weight, tuple(grads), output_mask, step)
    for rows in row_chunks("linear_cross_entropy_vocab_parallel_with_grad", input, step):
        logits, slope = chunk_logits_with_slope(input[rows], linear_weight, linear_bias, logit_scale, softcap)
        per_shard = [torch.where(hit[rows], logits.gather(1, column[rows]).squeeze(1), 0.0)]
        if label_smoothing:
            per_shard.append(weighted_logits(logits, own_weight))
        own_largest = None
        if argmax:
            max_logit, own_column = logits.max(1)
            own_largest = (max_logit, own_column + vocab_start)
        row_max, row_sum = exponentiate_rows(logits)
        own_lse = row_max + row_sum.log()
        lse, share, target_logit, logit_sum, column_of_largest = exchange.whole_rows([own_lse, *per_shard], own_largest)
        if argmax:
            largest[rows] = column_of_largest
        terms = exchange.terms(rows)
        losses[rows] = torch.where(valid[rows], terms.loss(target_logit, lse, logit_sum), 0.0)
        # E = exp(z - row_max) becomes exp(z - lse); a bias of -inf may switch off all of this rank's classes
        normalization = torch.where(row_sum > 0.0, share / row_sum, 0.0 * share)
        grad_logits = logits.mul_((scale[rows] * terms.d_lse(lse) * normalization)[:, None])
        add_target_and_sum(
            grad_logits,
            column[rows],
            torch.where(hit[rows], -terms.target_factor * scale[rows], 0.0),
            -terms.smoothing * scale[rows] if label_smoothing else None,
            own_weight,
        )
        gradients.add(rows, apply_slope(grad_logits, slope))
        del logits, grad_logits, slope  # before the next chunk is allocated
    gradients.finish()
    torch.sum(row_scale * losses, dim=0, out=loss)
    return loss, losses, *grads, largest
