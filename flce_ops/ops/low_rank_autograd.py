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

from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction
from flce_ops.meta.arguments import LowRankWithGrad, WithGrad
from flce_ops.ops.formula import saved, wanted, where_wanted
from flce_ops.ops.made_in_forward import MadeInForward
from flce_ops.ops.with_grad_autograd import differentiable_gradients

# N tokens, D hidden, V vocabulary, r rank of the pair


class LowRankWithGradFormula(MadeInForward):
    arguments = LowRankWithGrad
    op = "linear_cross_entropy_low_rank_with_grad"
    made = ("input", "low_rank_input", "low_rank_weight", "linear_bias", "class_scale")

    @classmethod
    def check(cls, op, values):
        if values[cls.arguments.index["linear_weight"]].requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{op._schema.name}: linear_weight gets no gradient here; pass it detached")

    @classmethod
    def made_again(cls, call, grad_loss=None):
        gradients, losses = differentiable_gradients(concatenated(call), grad_loss)
        return of_pair(call, gradients), losses

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        super().setup_context(ctx, inputs, output)
        if not any(inputs[cls.arguments.index["output_mask"]]):
            ctx.mark_non_differentiable(*output[2:])

    @classmethod
    def backward(cls, ctx, grad_loss, grad_losses, *_):
        if any(ctx.constants[cls.arguments.index["output_mask"]]):
            return super().backward(ctx, grad_loss)
        if grad_loss is None and grad_losses is None:
            return cls.arguments.gradients()
        call, _ = saved(ctx, cls.arguments)  # a compiled checkpoint would make the losses once more for who reads them
        *needs, needs_row_scale = wanted(ctx, cls.arguments, *cls.made, "row_scale")
        slope = grad_losses
        if grad_loss is not None:
            valid, dtype = call.operands.target != call.ignore_index, accumulation_dtype(call.operands.input.dtype)
            slope = call.reduction.scale_of_tokens(valid, dtype) * grad_loss
            slope = slope if grad_losses is None else slope + grad_losses
        call.reduction, call.output_mask = Reduction(slope), needs
        gradients, losses = (cls.made_again if torch.is_grad_enabled() else made_in_backward)(call)
        grad_row_scale = losses * grad_loss if needs_row_scale and grad_loss is not None else None
        return cls.arguments.gradients(**where_wanted(gradients, needs, cls.made), row_scale=grad_row_scale)


def made_in_backward(call: LowRankWithGrad) -> tuple[Sequence[Tensor], Tensor]:
    """The gradients, and the losses (N,)."""
    _, losses, *gradients = torch.ops.flce.linear_cross_entropy_low_rank_with_grad(
        *call.operands,
        *call.reduction,
        ignore_index=call.ignore_index,
        **call.loss._asdict(),
        **call.logits._asdict(),
        output_mask=call.output_mask,
    )
    return gradients, losses


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
