"""CUDA kernel of linear_policy_loss_with_grad: with_grad.py with the losses of row_policy.py.

What a step keeps of every token is its log-probability, in the place of its loss: one small kernel makes the losses of
all tokens of these in the end.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.math.log_probs import log_probs_of_targets
from flce_ops.math.options import Cotangents, Operands, TokenStatistics
from flce_ops.math.policy import policy_slopes
from flce_ops.math.policy_arguments import PolicyOptions, PolicyTokens
from flce_ops.math.reduction import Reduction
from flce_ops.meta.arguments import PolicyWithGrad, WithGrad
from flce_ops.meta.call import takes
from flce_ops.support.target_range import assert_in_range
from flce_ops.triton.chunks import contiguous, record_chunks
from flce_ops.triton.cut import cut_tokens
from flce_ops.triton.even_features import with_even_features
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_policy_rows import launch_finish_policy_rows, launch_policy_losses
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.gradients import finish_gradients, wanted_gradients
from flce_ops.triton.kept_tokens import keep_tokens
from flce_ops.triton.one_pass_step import OnePassStep, StepTokens
from flce_ops.triton.recompute import recompute_step
from flce_ops.triton.replay import repeated
from flce_ops.triton.row_policy import policy_of
from flce_ops.triton.sum_losses import launch_sum_losses

# N tokens, D hidden, V vocabulary


@takes(PolicyWithGrad)
@with_even_features
def launch_policy_with_grad(call: PolicyWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.outputs(call)
    input, linear_weight, target, linear_bias = call.operands
    target, linear_bias, row_scale = contiguous(target, linear_bias, call.reduction.row_scale)
    call.operands = call.operands._replace(target=target, linear_bias=linear_bias)
    call.reduction = Reduction(row_scale, call.reduction.denominator)
    call.tokens = call.tokens.map(lambda values: values.float().contiguous())
    in_range = target.new_empty((), dtype=torch.bool)
    with torch.cuda.device_of(input):
        chunks, notes = repeated(policy_step, call, fresh=(in_range, *outputs))
        assert_in_range(in_range, target, linear_weight.shape[0], call.ignore_index)
    record_chunks(call, linear_weight, chunks, *notes)
    return outputs


def policy_step(
    call: PolicyWithGrad,
    in_range: Tensor,  # () bool, out
    *outputs: Tensor,  # of the operator
) -> tuple[list[slice], list[str]]:
    """The chunks it took, and notes on them."""
    loss, losses, *grads, log_probs = outputs
    operands, reduction, logit_options = Operands(*call.operands), call.reduction, call.logits
    input, linear_weight, target, _, _ = operands
    policy, names = policy_of(call.tokens, call.policy)
    cut = cut_tokens(input, linear_weight, call.output_mask)
    kept, place = keep_tokens(target, call.ignore_index, linear_weight.shape[0], in_range)
    gradients = wanted_gradients(grads, call.output_mask)

    def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, None]:
        scale = logit_options.logit_scale
        return launch_finish_policy_rows(tokens, sums, policy, names, input.dtype, logit_scale=scale), None

    def log_probs_of(target_logit: Tensor, lse: Tensor, _: Tensor, lse_rest: Tensor) -> tuple[Any, Tensor, Tensor]:
        valid = place >= 0
        found = log_probs_of_targets(valid, target_logit, lse, lse_rest)
        return PolicyTerms(found, call.tokens, call.policy, valid), found, valid

    options = {"ignore_index": call.ignore_index, **logit_options._asdict(), "output_mask": call.output_mask}
    of_tokens = WithGrad.bind(*operands, *reduction, **options)
    per_token = StepTokens(None, reduction, log_probs, TokenStatistics())
    step = OnePassStep(operands, logit_options, kept, per_token, gradients, cut, finish_rows)
    chunks = step.run(partial(recompute_step, of_tokens, place, per_token, losses_of=log_probs_of))
    finish_gradients(grads, gradients, kept, place)
    launch_policy_losses(log_probs, place, losses, policy, names)
    launch_sum_losses(losses, reduction, kept.total, loss)
    return chunks, cut.notes


class PolicyTerms(NamedTuple):
    """LossTerms of flce_ops/math/loss.py, of a policy."""

    log_probs: Tensor  # (N,)
    tokens: PolicyTokens
    policy: PolicyOptions
    valid: Tensor  # (N,)

    def cotangents(self, target_logit: Tensor, lse: Tensor, scale: Tensor) -> Cotangents:  # (N,) each
        slopes = torch.where(self.valid, policy_slopes(self.log_probs, self.tokens, self.policy, scale), 0.0)
        return Cotangents(slopes, -slopes, None)
