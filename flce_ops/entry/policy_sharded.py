"""linear_policy_loss on DTensors: tokens sharded in one pass on each rank; a sharded vocabulary recomputes in backward.

vocabulary sharded    log-probabilities as linear_log_probs makes them, 2 numbers a token exchanged; the losses and
                      their slopes on every rank
"""

from torch import Tensor
from torch.distributed.tensor import Partial

from flce_ops.distributed.layout import check_plain_target, layout_of
from flce_ops.distributed.local import localize, localize_head
from flce_ops.distributed.sparse_seed import sparse_of_rank
from flce_ops.distributed.vocab_parallel import vocab_parallel_rows
from flce_ops.entry.policy_plain import (
    OP,
    check_arguments,
    losses_from_forward,
    losses_of_rows,
    losses_with_grad,
    policy_options,
    tokens_of,
)
from flce_ops.entry.schemas import PolicyLoss
from flce_ops.entry.sharded import denominator_over_tokens, per_token, quotient_over_tokens
from flce_ops.entry.sparse_gradient import check_sparse_gradient, refuse_sparse_gradient
from flce_ops.entry.weightless import without_weightless
from flce_ops.math.options import Operands, TokenLosses
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction, row_factor, weighted_sum
from flce_ops.math.scalars import logit_options
from flce_ops.objectives.cross_entropy import LossOptions
from flce_ops.objectives.policy import CONSTANTS
from flce_ops.ops.autocast import autocast_head
from flce_ops.ops.paths import policy_in_one_pass

# N tokens of this rank, D hidden, V vocabulary


def dtensor_composite(call: PolicyLoss) -> tuple[Tensor, Tensor]:
    """flce_ops.entry.policy_plain.plain_composite when an argument is a DTensor."""
    others = ("target", *CONSTANTS, "linear_bias", "token_weight", "normalizer")
    layout = layout_of(call.input, call.linear_weight, OP, **{name: getattr(call, name) for name in others})
    check_plain_target(call.target, call.input, OP)
    autocast_head(call)
    check_arguments(call)
    call.sparse = sparse_of_rank(layout, call.sparse)
    check_sparse_gradient(OP, call)
    num_classes, target_shape = call.linear_weight.shape[0], call.target.shape
    tokens_shape, head = localize_head(layout, call.input, call.linear_weight, call.target, call.linear_bias)
    operands = Operands(*head)
    input, linear_weight, _, linear_bias, _ = operands
    tokens = tokens_of(call).map(lambda values: localize(layout, values, layout.tokens).reshape(-1))
    token_weight = localize(layout, call.token_weight, layout.tokens)
    number_gradient = layout.placements(tokens=Partial())
    normalizer = localize(layout, call.normalizer, layout.replicated, gradient=number_gradient)
    options = policy_options(call)
    problem = TokenLosses(operands, call.ignore_index, LossOptions(), logit_options(call.numbers, input))
    problem = problem._replace(sparse=call.sparse)
    accumulate, valid = accumulation_dtype(input.dtype), problem.valid
    token_weight = None if token_weight is None else token_weight.reshape(-1).to(accumulate)
    denominator = denominator_over_tokens(layout, call.reduction, normalizer, valid, accumulate, operands.target, None)
    factor = row_factor(valid, token_weight, denominator, accumulate)
    problem = without_weightless(problem, token_weight, factor, num_classes)
    local_loss = None
    if layout.splits_vocabulary:
        refuse_sparse_gradient(OP, call, "over a sharded vocabulary")
        rows = vocab_parallel_rows(
            layout,
            problem.operands,
            num_classes=num_classes,
            ignore_index=problem.ignore_index,
            logits=problem.logits,
        )
        losses, log_probs = losses_of_rows(problem.valid, rows.target_logit, rows.lse, None, tokens, options)
    elif call.reduction != "none" and policy_in_one_pass(
        input, linear_weight, linear_bias, sparse=call.sparse.gradient_threshold != 0.0
    ):
        local_loss, losses, log_probs = losses_with_grad(problem, Reduction(factor), tokens, options)
    else:
        losses, log_probs = losses_from_forward(problem, tokens, options)
    log_probs = per_token(layout, log_probs.reshape(tokens_shape), target_shape)
    if call.reduction == "none":
        return per_token(layout, (losses * factor).reshape(tokens_shape), target_shape), log_probs
    local_loss = (losses * factor).sum() if local_loss is None else local_loss
    total = weighted_sum(valid, token_weight, losses)
    return quotient_over_tokens(layout, local_loss, total, denominator), log_probs
