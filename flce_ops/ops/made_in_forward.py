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
from ..support.holes import refuse_hole
from ..support.torch_private import graph_is_kept_after_this_backward, is_batched, written_over_where_donated
from ..support.versions import has_triton, made_by_nvidia
from .function import OperatorFunction, wanted, where_wanted

# N tokens


MULTIPLY = "linear_cross_entropy_upstream"


def multiply_by_grad_output(
    made: Sequence[Tensor], output_mask: Sequence[bool], factor: Tensor, leaf: Tensor
) -> list[Tensor | None]:
    """Returns made * factor for each gradient in `made`, or None if it is not wanted. Multiplies in place if nobody
    else can read the gradients.
    """
    grads = [grad if want else None for grad, want in zip(made, output_mask)]
    here = [grad for grad in grads if grad is not None]
    if is_batched(factor):  # is_grads_batched=True: a batch of factors
        products = multiply(here, factor)
    elif any(type(tensor) is not Tensor for tensor in (factor, *here)):
        # A tensor subclass (functional, fake) means that the call is traced. AOTAutograd refuses a second derivative
        # only if the backward graph reads a tensor that requires a gradient. Gradients made in forward require none,
        # and would silently be treated as constants.
        op, in_place = (getattr(ops, name).default for name in (MULTIPLY, f"{MULTIPLY}_"))
        written_over_where_donated(op, in_place)
        products = op(here, factor, leaf)
    elif graph_is_kept_after_this_backward():
        products = multiply(here, factor)
    else:
        multiply_in_place(here, factor)
        products = here
    found = iter(products)
    return [None if grad is None else next(found) for grad in grads]


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


def gradients_of_loss(
    function: type["MadeInForward"],
    ctx,
    call: Any,
    saved: Sequence[Tensor],  # the losses, and the gradients that forward made
    grad_loss: Tensor | None,
) -> dict[str, Tensor | None]:
    """The gradients, multiplied by grad_loss, by the names of the operator's arguments."""
    made = function.arguments.made
    *needs, needs_row_scale = wanted(ctx, function.arguments, *made, "row_scale")
    assert grad_loss is not None
    if torch.is_grad_enabled():  # true under create_graph
        found, losses = function.made_again(call, grad_loss)
    else:
        losses, *gradients = saved
        leaf = losses
        for name, need in zip(made, needs):
            # takes the last operand that needs a gradient, rather a parameter than input: parameters stay in memory
            # anyway, but a compiled graph would have to save input
            if need:
                leaf = getattr(call.operands, name, leaf)
        of_forward = (*call.output_mask, vars(call).get("scale_gradient", False))
        mask = [have and need for have, need in zip(of_forward, needs)]
        found = multiply_by_grad_output(gradients, mask, grad_loss, leaf)
    grad_row_scale = losses * grad_loss if needs_row_scale else None
    return where_wanted(found, needs, made) | {"row_scale": grad_row_scale}


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
        made = [result for result, kind in zip(results, cls.arguments.results) if kind.operand]
        return results[1], *made

    @classmethod
    def gradients(cls, ctx, call, saved, grad_loss, *_):
        return gradients_of_loss(cls, ctx, call, saved, grad_loss)
