"""The loss of a frozen head with a low-rank pair: linear_weight is a constant.

    an output_mask       its gradients exist after forward                                       <- times one scalar
    a mask of nothing    the operator runs again in backward, row_scale the slopes of the tokens' losses; so losses may
                         have a gradient too

Under create_graph they are built from the differentiable operators, on input beside low_rank_input and linear_weight
beside low_rank_weight, for which linear_weight is copied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_ops.math.reduction import Reduction
from flce_ops.meta.arguments import LowRankWithGrad, WithGrad
from flce_ops.ops.formula import Formula, save, saved, wanted
from flce_ops.ops.upstream import multiply_by_upstream
from flce_ops.ops.with_grad_autograd import differentiable_gradients

# N tokens, D hidden, V vocabulary, r rank of the pair

NAMES = ("input", "low_rank_input", "low_rank_weight", "linear_bias", "class_scale")  # in the order of the output_mask


class LowRankWithGradFormula(Formula):
    """loss, and where the mask asks for nothing losses; the other results carry no gradient."""

    arguments = LowRankWithGrad
    op = "linear_cross_entropy_low_rank_with_grad"

    @classmethod
    def check(cls, op, values):
        if values[cls.arguments.index["linear_weight"]].requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{op._schema.name}: linear_weight gets no gradient here; pass it detached")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        made_in_forward = any(inputs[LowRankWithGrad.index["output_mask"]])
        ctx.mark_non_differentiable(*output[1 if made_in_forward else 2 :])
        save(ctx, inputs, *output[1:])

    @staticmethod
    def backward(ctx, grad_loss, grad_losses, *_):
        if grad_loss is None and grad_losses is None:
            return LowRankWithGrad.gradients()
        call, (losses, *made) = saved(ctx, LowRankWithGrad)
        *needs, needs_row_scale = wanted(ctx, LowRankWithGrad, *NAMES, "row_scale")
        if torch.is_grad_enabled() or not any(call.output_mask):  # create_graph: the saved gradients have no graph
            gradients, losses = made_in_backward(call, needs, losses, grad_loss, grad_losses)
        else:
            leaf = next((getattr(call.operands, name) for name, need in zip(NAMES, needs) if need), losses)
            gradients = multiply_by_upstream(made, call.output_mask, grad_loss, leaf)
        by_name = {name: gradient if need else None for name, gradient, need in zip(NAMES, gradients, needs)}
        grad_row_scale = losses * grad_loss if needs_row_scale and grad_loss is not None else None
        return LowRankWithGrad.gradients(**by_name, row_scale=grad_row_scale)


def made_in_backward(
    call: LowRankWithGrad,
    mask: list[bool],
    losses: Tensor,  # (N,)
    grad_loss: Tensor | None,  # ()
    grad_losses: Tensor | None,  # (N,)
) -> tuple[Sequence[Tensor], Tensor]:
    """The five gradients, and the losses: under create_graph as functions of the operands."""
    slope = grad_losses
    if grad_loss is not None:
        slope = call.reduction.scale_of_tokens(call.operands.target != call.ignore_index, losses.dtype) * grad_loss
        slope = slope if grad_losses is None else slope + grad_losses
    call.reduction, call.output_mask = Reduction(slope), mask
    if torch.is_grad_enabled():
        gradients, losses = differentiable_gradients(concatenated(call), None)
        return of_pair(call, gradients), losses
    _, _, *made = torch.ops.flce.linear_cross_entropy_low_rank_with_grad(
        *call.operands,
        *call.reduction,
        ignore_index=call.ignore_index,
        **call.loss._asdict(),
        **call.logits._asdict(),
        output_mask=mask,
    )
    return made, losses


def concatenated(call: LowRankWithGrad) -> WithGrad:
    """The same loss by the ordinary operator."""
    want_input, want_pair_input, want_pair_weight, want_bias, want_scale = call.output_mask
    return WithGrad.bind(
        *call.operands.concatenated,
        *call.reduction,
        ignore_index=call.ignore_index,
        **call.loss._asdict(),
        **call.logits._asdict(),
        output_mask=[want_input or want_pair_input, want_pair_weight or want_scale, want_bias],
    )


def of_pair(call: LowRankWithGrad, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The five gradients, from the three of `concatenated`."""
    (of_input, of_weight, of_bias), hidden = gradients, call.operands.input.shape[1]
    want_input, want_pair_input, want_pair_weight, _, want_scale = call.output_mask
    nothing = of_bias.new_empty(0)
    of_scale, scale = nothing, call.operands.class_scale
    if scale is not None:
        of_scale = of_scale.to(scale.dtype)
        if want_scale:
            of_scale = (of_weight * call.operands.unscaled_weight).sum(1, dtype=scale.dtype)
        if want_pair_weight:
            of_weight = (of_weight * scale[:, None]).to(of_weight.dtype)
    return [
        of_input[:, :hidden] if want_input else nothing,
        of_input[:, hidden:] if want_pair_input else nothing,
        of_weight[:, hidden:] if want_pair_weight else nothing,
        of_bias,
        of_scale,
    ]
