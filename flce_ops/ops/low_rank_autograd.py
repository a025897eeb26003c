"""The loss of a frozen head with a low-rank pair: its gradients exist after forward, and linear_weight is a constant.

Under create_graph they are built from the differentiable operators, on input beside low_rank_input and linear_weight
beside low_rank_weight, for which linear_weight is copied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_ops.meta.arguments import LowRankWithGrad, WithGrad
from flce_ops.ops.formula import Formula, save, saved, wanted
from flce_ops.ops.upstream import multiply_by_upstream
from flce_ops.ops.with_grad_autograd import differentiable_gradients

# N tokens, D hidden, V vocabulary, r rank of the pair

NAMES = ("input", "low_rank_input", "low_rank_weight", "linear_bias", "class_scale")  # in the order of the output_mask


class LowRankWithGradFormula(Formula):
    """loss; the other results carry no gradient."""

    arguments = LowRankWithGrad
    op = "linear_cross_entropy_low_rank_with_grad"

    @classmethod
    def check(cls, op, values):
        if values[cls.arguments.index["linear_weight"]].requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{op._schema.name}: linear_weight gets no gradient here; pass it detached")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, *output[1:])

    @staticmethod
    def backward(ctx, grad_loss, *_):
        if grad_loss is None:
            return LowRankWithGrad.gradients()
        call, (losses, *made) = saved(ctx, LowRankWithGrad)
        *needs, needs_row_scale = wanted(ctx, LowRankWithGrad, *NAMES, "row_scale")
        if torch.is_grad_enabled():  # create_graph: the saved gradients have no graph
            gradients, losses = differentiable_gradients(concatenated(call), grad_loss)
            gradients = of_pair(call, gradients)
        else:
            leaf = next((getattr(call.operands, name) for name, need in zip(NAMES, needs) if need), losses)
            gradients = multiply_by_upstream(made, call.output_mask, grad_loss, leaf)
        by_name = {name: gradient if need else None for name, gradient, need in zip(NAMES, gradients, needs)}
        return LowRankWithGrad.gradients(**by_name, row_scale=losses * grad_loss if needs_row_scale else None)


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
