"""The derivative of a scalar loss whose gradients forward has made, up to d(objective)/d(loss).

    forward     saves its arguments, the losses, the gradients made in the same pass
    backward    multiplies them by one scalar: in place where nobody can read them again, which keeps one copy of
                grad_linear_weight in memory, and out of place under retain_graph

Under create_graph the gradients are built again, from operators that have derivatives: those that were saved have no
graph.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from flce_ops.ops.formula import OPERANDS, Formula, save, saved, wanted, where_wanted
from flce_ops.ops.upstream import multiply_by_upstream

# N tokens


class MadeInForward(Formula):
    """Of an operator that returns loss, losses (N,), the gradients, and constants; only the first has a derivative."""

    made: ClassVar[tuple[str, ...]] = OPERANDS  # what the gradients are of, in the order of its output_mask

    @classmethod
    def made_again(cls, call: Any, grad_loss: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The gradients, times grad_loss, and the losses, as functions of the operands."""
        raise NotImplementedError

    @classmethod
    def setup_context(cls, ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, *output[1 : 2 + len(cls.made)])

    @classmethod
    def backward(cls, ctx, grad_loss, *_):
        if grad_loss is None:
            return cls.arguments.gradients()
        call, (losses, *gradients) = saved(ctx, cls.arguments)
        *needs, needs_row_scale = wanted(ctx, cls.arguments, *cls.made, "row_scale")
        if torch.is_grad_enabled():  # create_graph
            gradients, losses = cls.made_again(call, grad_loss)
        else:
            leaf = losses
            for name, need in zip(cls.made, needs):
                if need:  # the last one: parameters are in memory anyway, and a compiled graph would save input for it
                    leaf = getattr(call.operands, name)
            gradients = multiply_by_upstream(gradients, call.output_mask, grad_loss, leaf)
        grad_row_scale = losses * grad_loss if needs_row_scale else None
        return cls.arguments.gradients(**where_wanted(gradients, needs, cls.made), row_scale=grad_row_scale)
