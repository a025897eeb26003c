"""Kernel of linear_cross_entropy_with_grad: the scalar loss and its gradients, from one pass over the logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import chunk_products, product_is_rounded, row_blocks
from flce_ops.aten.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.aten.kept_tokens import ONE_PASS_FILLS, on_kept_tokens, zero_where_ignored
from flce_ops.aten.logits import (
    activate_with_slope,
    add_target_and_sum,
    apply_slope,
    upcast,
    weighted_logits,
)
from flce_ops.aten.row_statistics import exponentiate_with_statistics, extra_matrices
from flce_ops.math.loss import terms_of_tokens
from flce_ops.math.options import TokenStatistics
from flce_ops.math.sparse_gradient import Draws, keep_entries
from flce_ops.math.two_sum import two_sum
from flce_ops.meta.arguments import WithGrad, takes
from flce_ops.support.readable import copy_bytes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary


@takes(WithGrad)
def with_grad(call: WithGrad) -> meta.OnePassOutputs:
    outputs = meta.with_grad_outputs(call)
    check_target_range(call.operands.target, call.operands.linear_weight.shape[0], call.ignore_index)
    draws: tuple[Draws, ...] = ()
    if call.sparse.gradient_threshold:
        draws = (Draws(torch.arange(call.operands.target.shape[0], device=call.operands.target.device)),)
        call.notes += ("a sparse gradient",)
    on_kept_tokens(with_grad_of_rows, call, outputs, ONE_PASS_FILLS, *draws)
    return outputs


def with_grad_of_rows(call: WithGrad, outputs: Sequence[Tensor], draws: Draws | None = None) -> None:
    loss, losses, *grads = outputs[:5]
    statistics = TokenStatistics.found(call.statistics, outputs[5:])
    input, linear_weight, target, linear_bias, weight = call.operands
    num_classes, output_mask = linear_weight.shape[0], call.output_mask
    column = zero_where_ignored(input, target).long().unsqueeze(1)
    accumulate = losses.dtype
    valid = target != call.ignore_index
    scale = call.reduction.scale_of_tokens(valid, accumulate)
    linear_bias, class_weight = upcast(linear_bias, accumulate), upcast(weight, accumulate)
    loss_of_tokens = terms_of_tokens(column.squeeze(1), class_weight, num_classes, call.loss, accumulate)
    in_block = product_is_rounded(input) + (call.logits.softcap is not None) + extra_matrices(call.statistics)
    step = rows_beside_gradients(
        input, num_classes, output_mask[1], matrices_in_block=in_block, reserved=copy_bytes(linear_weight)
    )
    gradients = GradientAccumulator(input, linear_weight, grads, output_mask, step)
    for chunk, product in chunk_products(call, input, linear_weight, step):
        blocks = row_blocks(input, chunk, product, column, scale, losses)
        for rows, block, own_column, own_scale, own_losses in blocks:
            terms = loss_of_tokens.of(rows)
            logits, slope = activate_with_slope(block, linear_bias, call.logits)
            target_logit = logits.gather(1, own_column).squeeze(1)
            logit_sum = weighted_logits(logits, class_weight) if call.loss.label_smoothing else None
            row_max, row_sum = exponentiate_with_statistics(logits, statistics, rows, num_classes)
            lse, lse_rest = two_sum(row_max, row_sum.log())
            own_losses.copy_(terms.loss(target_logit, lse, logit_sum, lse_rest))
            cotangents = terms.cotangents(target_logit, lse, own_scale)
            grad_logits = logits.mul_((cotangents.grad_lse / row_sum)[:, None])
            add_target_and_sum(grad_logits, own_column, cotangents, class_weight)
            gradients.add_bias(apply_slope(grad_logits, slope))
            if draws is not None:  # without a softcap: the slope is one number, or none
                own_slope = cotangents.grad_lse if slope is None else cotangents.grad_lse * slope
                keep_entries(grad_logits, own_slope, call.sparse, draws.of(rows))
            gradients.round_block(block, grad_logits)
            del logits, grad_logits, slope  # before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    loss.copy_(call.reduction.loss(zero_where_ignored(input, losses), valid))
