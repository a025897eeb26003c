"""The gradients of linear_policy_loss_with_grad made a second time, from the operators that have derivatives."""

from collections.abc import Callable

import torch
from torch import Tensor

from flce_ops.math.log_probs import log_probs_of_targets
from flce_ops.meta.arguments import PolicyWithGrad
from flce_ops.meta.policy import check_constants
from flce_ops.objectives.policy import CONSTANTS, Policy
from flce_ops.ops.made_in_forward import MadeInForward

# N tokens, D hidden, V vocabulary

FORWARD_MODE_REFUSAL = (
    "linear_policy_loss: forward-mode differentiation (jvp, jacfwd, hessian, make_dual) is not implemented; use "
    "reverse mode (grad, jacrev)"
)


class PolicyWithGradFormula(MadeInForward):
    arguments = PolicyWithGrad
    op = "linear_policy_loss_with_grad"
    forward_mode_refusal = FORWARD_MODE_REFUSAL

    @classmethod
    def check(cls, op, values):
        constants = {name: values[PolicyWithGrad.index[name]] for name in CONSTANTS}
        check_constants(op._schema.name.removeprefix("flce::"), **constants)

    @classmethod
    def made_again(cls, call, grad_loss):
        forward, backward = torch.ops.flce.linear_cross_entropy_forward, torch.ops.flce.linear_cross_entropy_backward
        return recomputed_policy_step(call, forward, backward, grad_loss)[:2]


def recomputed_policy_step(
    call: PolicyWithGrad, forward: Callable, backward: Callable, grad_loss: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """The gradients, times grad_loss, the losses and the log-probabilities, from the forward and backward operators."""
    input, linear_weight, target, linear_bias = call.operands
    operands = (input, linear_weight, target, linear_bias, None)
    logits = {"ignore_index": call.ignore_index, **call.logits._asdict()}
    target_logit, lse, *_, lse_rest, retained = forward(*operands, **logits)
    valid = target != call.ignore_index
    log_probs = log_probs_of_targets(valid, target_logit, lse, lse_rest)
    tokens = call.tokens.map(lambda values: torch.where(valid, values, 0.0).to(lse.dtype))
    scale = call.reduction.scale_of_tokens(valid, lse.dtype)
    scale = scale if grad_loss is None else scale * grad_loss
    objective = Policy(call.policy, tokens)
    losses, slopes = objective.losses_and_slopes(-log_probs, lse, None)
    gradients = backward(
        *objective.cotangents(slopes, scale),
        *operands,
        lse,
        **logits,
        output_mask=call.output_mask,
        lse_rest=lse_rest,
        retained=retained if retained.shape[0] else None,
    )
    return gradients, torch.where(valid, losses, 0.0), log_probs
