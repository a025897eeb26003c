"""ATen kernel of linear_policy_loss_with_grad: with_grad.py with the losses of flce_ops/math/policy.py.

A row's slope f' is known with its log-probability, so G = g f' (onehot(y) - p) is made in the same pass. The losses
are functions of the log-probabilities and come last, over N numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import chunk_products, product_is_rounded, row_blocks
from flce_ops.aten.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.aten.kept_tokens import on_kept_tokens, zero_where_ignored
from flce_ops.aten.logits import activate_with_slope, apply_slope, exponentiate_rows
from flce_ops.math.loss import surprisal
from flce_ops.math.policy import policy_losses, policy_slopes
from flce_ops.math.two_sum import two_sum
from flce_ops.meta.arguments import PolicyWithGrad
from flce_ops.meta.call import takes
from flce_ops.support.readable import copy_bytes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary


@takes(PolicyWithGrad)
def policy_with_grad(call: PolicyWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.outputs(call)
    check_target_range(call.operands.target, call.operands.linear_weight.shape[0], call.ignore_index)
    on_kept_tokens(policy_with_grad_of_rows, call, outputs, call.fills)
    return outputs


def policy_with_grad_of_rows(call: PolicyWithGrad, outputs: Sequence[Tensor]) -> None:
    loss, losses, *grads, log_probs = outputs
    input, linear_weight, target, linear_bias = call.operands
    accumulate = losses.dtype
    column = zero_where_ignored(input, target).long().unsqueeze(1)
    valid = target != call.ignore_index
    scale = call.reduction.scale_of_tokens(valid, accumulate)
    tokens = call.tokens.map(lambda values: zero_where_ignored(input, values).to(accumulate))
    in_block = product_is_rounded(input) + (call.logits.softcap is not None)
    num_classes, want_weight = linear_weight.shape[0], call.output_mask[1]
    step = rows_beside_gradients(
        input, num_classes, want_weight, matrices_in_block=in_block, reserved=copy_bytes(linear_weight)
    )
    gradients = GradientAccumulator(input, linear_weight, grads, call.output_mask, step)
    for chunk, product in chunk_products(call, input, linear_weight, linear_bias, step):
        blocks = row_blocks(input, chunk, product, column, valid, scale, log_probs)
        for rows, block, own_column, own_valid, own_scale, own_log_probs in blocks:
            logits, dz_du = activate_with_slope(block, call.logits)
            target_logit = logits.gather(1, own_column).squeeze(1)
            row_max, row_sum = exponentiate_rows(logits)
            own_log_probs.copy_(-surprisal(target_logit, *two_sum(row_max, row_sum.log())))
            cotangent = policy_slopes(own_log_probs, tokens.of(rows), call.policy, own_scale)
            cotangent = torch.where(own_valid, cotangent, 0.0)  # of -inf, an ignored token's, a slope is nan
            grad_logits = logits.mul_((-cotangent / row_sum)[:, None])
            grad_logits.scatter_add_(1, own_column, cotangent[:, None])
            gradients.add_block(block, apply_slope(grad_logits, dz_du))
            del logits, grad_logits, dz_du  # before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    losses.copy_(policy_losses(log_probs, tokens, call.policy))
    loss.copy_(call.reduction.loss(zero_where_ignored(input, losses), valid))
