"""linear_policy_loss, the body of flce::linear_policy_loss.

composite -> losses_with_grad    one pass: linear_policy_loss_with_grad
          -> losses_of_rows      differentiable ATen over log-probabilities; of a sharded vocabulary always

Around them stands loss.py's loss_of_tokens.
"""

from functools import partial

import torch
from torch import Tensor

from flce_ops.distributed.one_rank import OneRank
from flce_ops.entry.arguments import check_policy_loss
from flce_ops.entry.loss import layout_of_call, loss_of_tokens, rows_of
from flce_ops.entry.schemas import PolicyLoss
from flce_ops.math.log_probs import log_probs_of_targets
from flce_ops.math.options import TokenLosses, logit_options, scalar, scalar_unless
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction
from flce_ops.meta.policy import check_policy
from flce_ops.objectives.cross_entropy import LossOptions
from flce_ops.objectives.policy import CONSTANTS, Policy, PolicyOptions, PolicyTokens
from flce_ops.ops.paths import policy_in_one_pass
from flce_ops.ops.situations import needs_gradient

# N tokens, D hidden, V vocabulary

OP = "linear_policy_loss"


def composite(call: PolicyLoss) -> tuple[Tensor, Tensor]:
    """Body of torch.ops.flce.linear_policy_loss: (loss, log_probs), () or (...), and (...)."""
    layout = layout_of_call(OP, call)
    check_policy_loss(OP, call)
    options = policy_options(call)
    check_policy(OP, options, call.ref_log_probs)
    operands = layout.head(call)
    input, linear_weight, _, linear_bias, _ = operands
    dtype = accumulation_dtype(input.dtype)
    tokens = PolicyTokens(*(getattr(call, name) for name in CONSTANTS))
    tokens = tokens.map(lambda values: layout.per_token(values).to(dtype))
    logits = logit_options(call.numbers, input)
    problem = TokenLosses(operands, call.ignore_index, LossOptions(), logits, sparse=call.sparse)
    with_grad = None
    sparse = call.sparse.gradient_threshold != 0.0
    in_one_pass = call.reduction != "none" and not layout.splits_vocabulary
    if in_one_pass and policy_in_one_pass(input, linear_weight, linear_bias, sparse=sparse):
        with_grad = partial(losses_with_grad, tokens=tokens, options=options)
    from_forward = partial(losses_of_rows, layout, tokens=tokens, options=options)
    loss, (log_probs,) = loss_of_tokens(layout, call, problem, from_forward, with_grad)
    return loss, log_probs


def losses_with_grad(
    problem: TokenLosses, reduction: Reduction, tokens: PolicyTokens, options: PolicyOptions
) -> tuple[Tensor, Tensor, tuple[Tensor]]:
    """() with its gradients, the losses of tokens and their log-probabilities, (N,) each."""
    input, linear_weight, target, linear_bias, _ = problem.operands
    loss, losses, *_, log_probs = torch.ops.flce.linear_policy_loss_with_grad(
        input,
        linear_weight,
        target,
        linear_bias,
        *tokens,
        *reduction,
        ignore_index=problem.ignore_index,
        **options._asdict(),
        **problem.logits._asdict(),
        output_mask=[needs_gradient(operand) for operand in (input, linear_weight, linear_bias)],
    )
    return loss, losses, (log_probs,)


def losses_of_rows(
    layout: OneRank, problem: TokenLosses, tokens: PolicyTokens, options: PolicyOptions
) -> tuple[Tensor, tuple[Tensor]]:
    """(N,) each, 0 where ignored; the second a constant."""
    rows, valid = rows_of(layout, problem), problem.valid
    log_probs = log_probs_of_targets(valid, rows.target_logit, rows.lse, rows.lse_rest)
    tokens = tokens.map(lambda values: torch.where(valid, values, 0.0))
    losses, _ = Policy(options, tokens).losses_and_slopes(-log_probs, rows.lse, None)
    return torch.where(valid, losses, 0.0), (log_probs.detach(),)


def policy_options(call: PolicyLoss) -> PolicyOptions:
    """The user's numbers as the operators take them; without a beta there is no KL term.

    dynamic=True makes a variable of beta. Without ref_log_probs it is compared all the same, so a graph knows it is 0.
    """
    no_kl = call.ref_log_probs is None and call.beta == 0.0
    return PolicyOptions(
        call.objective,
        scalar(call.clip_low, call.input),
        scalar(call.clip_high, call.input),
        None if call.dual_clip is None else scalar(call.dual_clip, call.input),
        None if no_kl else scalar_unless(0.0, call.beta, call.input),
        call.kl_estimator,
    )
