"""linear_policy_loss of plain tensors: picks the path, flattens the tokens, reduces over N numbers.

plain_composite -> losses_with_grad       one pass: linear_policy_loss_with_grad
                -> losses_from_forward    the forward operator's log-probabilities, then differentiable ATen

Around both stands plain.py's loss_of_tokens.
"""

from functools import partial

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_head, check_normalizer, check_ranges, check_reduction
from flce_ops.entry.plain import loss_of_tokens
from flce_ops.entry.schemas import PolicyLoss
from flce_ops.entry.sparse_gradient import check_sparse_gradient
from flce_ops.math.log_probs import log_probs_of_targets
from flce_ops.math.options import Operands, TokenLosses
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction
from flce_ops.math.scalars import logit_options, scalar, scalar_unless
from flce_ops.meta.checks import check_dense, check_device, check_real
from flce_ops.meta.policy import check_constants, check_policy
from flce_ops.objectives.cross_entropy import LossOptions
from flce_ops.objectives.policy import CONSTANTS, Policy, PolicyOptions, PolicyTokens
from flce_ops.ops.autocast import autocast_head
from flce_ops.ops.paths import policy_in_one_pass
from flce_ops.ops.situations import needs_gradient

# N tokens, D hidden, V vocabulary

OP = "linear_policy_loss"


def plain_composite(call: PolicyLoss) -> tuple[Tensor, Tensor]:
    """() or (...), and (...)."""
    autocast_head(call)
    check_arguments(call)
    check_sparse_gradient(OP, call)
    shape, count = call.target.shape, call.target.numel()
    operands = Operands(
        call.input.reshape(count, call.input.shape[-1]),
        call.linear_weight,
        call.target.reshape(count),
        call.linear_bias,
    )
    loss, log_probs = loss_and_log_probs(call, operands, tokens_of(call).map(lambda values: values.reshape(count)))
    return loss.reshape(shape) if call.reduction == "none" else loss, log_probs.reshape(shape)


def loss_and_log_probs(call: PolicyLoss, operands: Operands, tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
    """() or (N,), and (N,)."""
    options = policy_options(call)
    problem = TokenLosses(operands, call.ignore_index, LossOptions(), logit_options(call.numbers, call.input))
    problem = problem._replace(sparse=call.sparse)
    input, linear_weight, _, linear_bias, _ = operands
    from_forward = partial(losses_from_forward, tokens=tokens, options=options)
    with_grad = None
    if call.reduction != "none" and policy_in_one_pass(
        input, linear_weight, linear_bias, sparse=call.sparse.gradient_threshold != 0.0
    ):
        with_grad = partial(losses_with_grad, tokens=tokens, options=options)
    return loss_of_tokens(call, problem, from_forward, with_grad)


def losses_with_grad(
    problem: TokenLosses, reduction: Reduction, tokens: PolicyTokens, options: PolicyOptions
) -> tuple[Tensor, Tensor, Tensor]:
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
    return loss, losses, log_probs


def losses_from_forward(problem: TokenLosses, tokens: PolicyTokens, options: PolicyOptions) -> tuple[Tensor, Tensor]:
    """(N,) each, 0 where ignored; the second a constant."""
    target_logit, lse, *_, lse_rest, _ = torch.ops.flce.linear_cross_entropy_forward(
        *problem.operands,
        ignore_index=problem.ignore_index,
        **problem.logits._asdict(),
        **problem.sparse._asdict(),
    )
    return losses_of_rows(problem.valid, target_logit, lse, lse_rest, tokens, options)


def losses_of_rows(
    valid: Tensor,  # (N,), like the next three
    target_logit: Tensor,
    lse: Tensor,
    lse_rest: Tensor | None,
    tokens: PolicyTokens,
    options: PolicyOptions,
) -> tuple[Tensor, Tensor]:
    """(N,) each, 0 where ignored; the second a constant."""
    log_probs = log_probs_of_targets(valid, target_logit, lse, lse_rest)
    tokens = tokens.map(lambda values: torch.where(valid, values, 0.0))
    losses, _ = Policy(options, tokens).losses_and_slopes(-log_probs, lse, None)
    return torch.where(valid, losses, 0.0), log_probs.detach()


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


def tokens_of(call: PolicyLoss) -> PolicyTokens:
    """(...) each."""
    dtype = accumulation_dtype(call.input.dtype)
    return PolicyTokens(call.advantages, call.old_log_probs, call.ref_log_probs).map(lambda values: values.to(dtype))


def check_arguments(call: PolicyLoss) -> None:
    """Refusals by name, without reading tensor data."""
    check_head(OP, call)
    tokens = call.input.shape[:-1]
    constants = {name: getattr(call, name) for name in CONSTANTS}
    per_token = {**constants, "token_weight": call.token_weight}
    check_dense(OP, **per_token, normalizer=call.normalizer)
    check_device(OP, call.input, **per_token)
    check_real(OP, **per_token)
    check_constants(OP, **constants)
    for name, tensor in per_token.items():
        if tensor is not None and tensor.shape != tokens:
            raise ValueError(
                f"{OP}: expected {name} of shape {tuple(tokens)}, one number per token, got {tuple(tensor.shape)}; one "
                f"a sequence is {name}[:, None].expand_as(target)"
            )
    check_ranges(OP, clip_low=call.clip_low, clip_high=call.clip_high, dual_clip=call.dual_clip)
    check_policy(OP, policy_options(call), call.ref_log_probs)
    check_reduction(OP, call.reduction)
    check_normalizer(OP, call.normalizer, call.reduction, call.input)
