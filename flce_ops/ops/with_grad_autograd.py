"""The gradients of linear_cross_entropy_with_grad made a second time, from the operators that have derivatives."""

from collections.abc import Callable

import torch
from torch import Tensor

from flce_ops.math.log_probs import surprisal
from flce_ops.math.options import Statistics, TokenStatistics
from flce_ops.math.slots import tokens_that_count
from flce_ops.math.statistics import asked_of_forward, statistics_of_forward
from flce_ops.meta.arguments import WithGrad
from flce_ops.objectives.cross_entropy import cross_entropy_of, weight_of_slots
from flce_ops.ops.formula import SPARSE_SECOND_DERIVATIVE_REFUSAL
from flce_ops.ops.made_in_forward import MadeInForward


class WithGradFormula(MadeInForward):
    arguments = WithGrad
    op = "linear_cross_entropy_with_grad"

    @classmethod
    def made_again(cls, call, grad_loss):
        if call.sparse.gradient_threshold:
            raise NotImplementedError(SPARSE_SECOND_DERIVATIVE_REFUSAL)
        return differentiable_gradients(call, grad_loss)


def differentiable_gradients(call: WithGrad, grad_loss: Tensor | None) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The gradients, times grad_loss, and the losses of tokens, as functions of the operands.

    They are built from the operators that have derivatives, not by asking autograd for the gradient by the operands:
    these carry the graph that made them, and a path from one to another would be taken here and again by the caller.
    """
    call.statistics = Statistics()  # they are known
    forward, backward = torch.ops.flce.linear_cross_entropy_forward, torch.ops.flce.linear_cross_entropy_backward
    return recomputed_step(call, forward, backward, grad_loss)[:2]


def recomputed_step(
    call: WithGrad, forward: Callable, backward: Callable, grad_loss: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, TokenStatistics]:
    """The gradients, times grad_loss, losses and statistics of `call`, from the forward and backward operators."""
    operands = call.operands
    logits = {"ignore_index": call.ignore_index, **call.logits._asdict()}
    found = forward(
        *operands, logit_sum=call.loss.label_smoothing != 0.0, **asked_of_forward(call.statistics), **logits
    )
    target_logit, lse, logit_sum, *_, lse_rest, retained = found
    target, slot_weight = operands.target, call.target_weight
    if slot_weight is not None:
        slot_weight = weight_of_slots(target, slot_weight, call.ignore_index, lse.dtype)
    objective = cross_entropy_of(target, operands.weight, operands.num_classes, call.loss, lse.dtype, slot_weight)
    logit_sum = logit_sum if call.loss.label_smoothing else None
    losses, slopes = objective.losses_and_slopes(surprisal(target_logit, lse, lse_rest), lse, logit_sum)
    valid = tokens_that_count(target, call.ignore_index)
    losses = torch.where(valid, losses, 0.0)
    scale = call.reduction.scale_of_tokens(valid, lse.dtype)
    cotangents = objective.cotangents(slopes, scale if grad_loss is None else scale * grad_loss)
    gradients = backward(
        *cotangents,
        *operands,
        lse,
        **logits,
        output_mask=call.output_mask,
        lse_rest=lse_rest,
        retained=retained if retained.shape[0] else None,
    )
    return gradients, losses, statistics_of_forward(call.statistics, found)
