"""Multiplies gradients that forward made by grad_output, the gradient of the objective by the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops import ops
from ..support.torch_private import (
    graph_is_kept_after_this_backward,
    is_batched,
    written_over_where_donated,
)
from ..support.vendor import device_type, has_triton, made_by_nvidia

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
    nvidia = bool(made) and device_type(made[0]) == "cuda" and made_by_nvidia()
    if nvidia and made[0].dtype != torch.float64 and has_triton():
        from ..triton import launch_scale_in_place

        launch_scale_in_place(made, factor)
    else:
        for grad in made:
            grad.mul_(factor)
