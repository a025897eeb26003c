"""The derivative of a scalar loss whose gradients forward has made, except for the factor d(objective)/d(loss).

    forward     keeps its arguments, the losses, the gradients made in the same pass
    backward    multiplies them by one scalar: in place if nobody can read them again, which keeps one copy of
                grad_linear_weight in memory; out of place under retain_graph

Saved gradients have no graph. Under create_graph they are computed again, from operators that have derivatives.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..support.holes import refuse_hole
from .function import OperatorFunction, wanted, where_wanted
from .grad_output import multiply_by_grad_output

# N tokens


class MadeInForward(OperatorFunction):
    """For an operator that returns loss, losses (N,), the gradients, and constants. Only the loss has a derivative."""

    with_derivative = ("loss",)

    second_derivative: ClassVar[str] = ""  # if there is no second derivative: the entry of HOLES with the reason

    @classmethod
    def made_again(cls, call: Any, grad_loss: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The gradients, multiplied by grad_loss, and the losses, as functions of the operands."""
        refuse_hole(cls.called(), cls.second_derivative)

    @classmethod
    def for_backward(cls, ctx, call, results):
        return results[1 : 2 + len(cls.arguments.made)]

    @classmethod
    def gradients(cls, ctx, call, saved, grad_loss, *others):
        made = cls.arguments.made
        *needs, needs_row_scale = wanted(ctx, cls.arguments, *made, "row_scale")
        found, losses = cls.times(call, saved, needs, grad_loss, *others)
        grad_row_scale = losses * grad_loss if needs_row_scale and grad_loss is not None else None
        return where_wanted(found, needs, made) | {"row_scale": grad_row_scale}

    @classmethod
    def times(
        cls, call: Any, saved: Sequence[Tensor], needs: list[bool], grad_loss: Tensor | None, *others: Tensor | None
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        """The gradients, multiplied by grad_loss, and the losses. Gradients that are not needed may be missing."""
        assert grad_loss is not None
        if torch.is_grad_enabled():  # true under create_graph
            return cls.made_again(call, grad_loss)
        losses, *gradients = saved
        leaf = losses
        for name, need in zip(cls.arguments.made, needs):
            # takes the last operand that needs a gradient, rather a parameter than input: parameters stay in memory
            # anyway, but a compiled graph would have to save input
            if need:
                leaf = getattr(call.operands, name)
        mask = [of_forward and need for of_forward, need in zip(call.output_mask, needs)]
        return multiply_by_grad_output(gradients, mask, grad_loss, leaf), losses
