"""The derivative of a scalar loss whose gradients forward has made, except for the factor d(objective)/d(loss).

    forward     keeps its arguments, the losses, the gradients made in the same pass
    backward    multiplies them by one scalar: in place if nobody can read them again, which keeps one copy of
                grad_linear_weight in memory; out of place under retain_graph

Not for float16, whose loss scale only backward knows: NOT_FLOAT16 in paths.py. Saved gradients have no graph. Under
create_graph they are computed again, from operators that have derivatives.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._ops import ops
from ..support.holes import refuse_hole, running
from ..support.torch_private import graph_is_kept_after_this_backward, is_batched, written_over_where_donated
from ..support.versions import has_triton, made_by_nvidia
from .function import OPERANDS, OperatorFunction, asked, restore

# N tokens


MULTIPLY = "linear_cross_entropy_upstream"


def multiplied(made: list[Tensor], factor: Tensor, leaf: Tensor) -> list[Tensor]:
    """Each gradient in `made` times `factor`. Multiplies in place if nobody else can read the gradients."""
    plain = type(factor) is Tensor
    for grad in made:
        plain &= type(grad) is Tensor
    if is_batched(factor):  # is_grads_batched=True: a batch of factors
        return multiply(made, factor)
    if not plain:
        # A tensor subclass (functional, fake) means that the call is traced. AOTAutograd refuses a second derivative
        # only if the backward graph reads a tensor that requires a gradient. Gradients made in forward require none,
        # and would silently be treated as constants.
        op, in_place = (getattr(ops, name).default for name in (MULTIPLY, f"{MULTIPLY}_"))
        written_over_where_donated(op, in_place)
        return op(made, factor, leaf)
    if graph_is_kept_after_this_backward():
        return multiply(made, factor)
    multiply_in_place(made, factor)
    return made


def multiply(made: Sequence[Tensor], factor: Tensor, leaf: Tensor | None = None) -> list[Tensor]:
    """Multiplies out of place. Traced graphs call this as an operator, and its argument `leaf` makes them read that
    tensor.
    """
    return [grad * factor for grad in made]


def multiply_in_place(made: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies in place. On NVIDIA GPUs a kernel does it, which returns immediately if the factor is 1."""
    nvidia = bool(made) and made[0].device.type == "cuda" and made_by_nvidia()
    if nvidia and made[0].dtype != torch.float64 and has_triton():
        from ..triton import launch_scale_in_place

        launch_scale_in_place(made, factor)
    else:
        for grad in made:
            grad.mul_(factor)


class MadeInForward(OperatorFunction):
    """For an operator that returns loss, losses (N,), the gradients, and constants. Only the loss has a derivative."""

    with_derivative = ("loss",)
    second_derivative: ClassVar[str] = ""  # if there is no second derivative: the entry of HOLES with the reason

    @classmethod
    def made_again(cls, ctx, call: Any, grad_loss: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The gradients, multiplied by grad_loss, and the losses, as functions of the operands."""
        refuse_hole(cls.called(), cls.second_derivative)

    @classmethod
    def for_backward(cls, ctx, values, results):
        kept = [results[1]]
        for place in cls.arguments.made_at:
            kept.append(results[place])
        return kept

    @classmethod
    def made(cls, ctx, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients among the saved results."""
        return saved[1:]

    @classmethod
    def of_cotangents(cls, ctx, grad_loss, *_):
        arguments = cls.arguments
        index, found = arguments.index, [None] * len(arguments.index)
        if grad_loss is None:
            return tuple(found)
        needs = asked(ctx)
        outer, running.function = running.function, ctx.function
        try:
            values, saved = restore(ctx, arguments)
            losses, leaf, here, places = saved[0], saved[0], [], []
            if torch.is_grad_enabled():  # true under create_graph
                if "output_mask" in index:
                    values[index["output_mask"]] = [needs[index[name]] for name in OPERANDS]
                    values[index["scale_gradient"]] = needs[index["logit_scale"]]
                products, losses = cls.made_again(ctx, arguments.of(values), grad_loss)
                places = [index[name] for name in arguments.made]
            else:
                mask = [*values[index["output_mask"]]] if "output_mask" in index else [True]
                if "scale_gradient" in index:
                    mask.append(values[index["scale_gradient"]])
                for name, was_made, gradient in zip(arguments.made, mask, cls.made(ctx, saved)):
                    place = index[name]
                    if was_made and needs[place]:
                        here.append(gradient)
                        places.append(place)
                    # takes the last operand that needs a gradient, rather a parameter than input: parameters stay in
                    # memory anyway, but a compiled graph would have to save input
                    if was_made and (name in OPERANDS or name == "logits"):
                        leaf = values[place]
                products = multiplied(here, grad_loss, leaf)
            for place, product in zip(places, products):
                found[place] = product if needs[place] else None
            if "row_scale" in index and needs[index["row_scale"]]:
                found[index["row_scale"]] = losses * grad_loss
            return tuple(found)
        finally:
            running.function = outer
