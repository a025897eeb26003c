"""Gradients that forward made, times the gradient of the objective by the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_ops.support.torch_private import graph_is_kept_after_this_backward, is_batched
from flce_ops.support.vendor import has_triton, made_by_nvidia


def multiply_by_upstream(
    made: Sequence[Tensor], output_mask: Sequence[bool], factor: Tensor, leaf: Tensor
) -> list[Tensor | None]:
    """made * factor, None where not wanted, in the same memory where these are the last users of it."""
    grads = [grad if want else None for grad, want in zip(made, output_mask)]
    if is_batched(factor):  # is_grads_batched: a batch of factors
        return [None if grad is None else grad * factor for grad in grads]
    plain = {type(tensor) for tensor in (factor, *grads) if tensor is not None} == {Tensor}
    if not plain:
        # A subclass is a tracer (functional, fake): record ordinary multiplications. AOTAutograd refuses a second
        # derivative only where the backward graph reads a tensor that requires one; gradients made in forward do not,
        # and would be differentiated as constants in silence.
        factor = torch.ops.flce.linear_cross_entropy_upstream(factor, leaf)
    if not plain or graph_is_kept_after_this_backward():
        return [None if grad is None else grad * factor for grad in grads]
    here = [grad for grad in grads if grad is not None]
    on_gpu = bool(here) and here[0].device.type == "cuda"  # row_scale alone may want a gradient
    if on_gpu and made_by_nvidia() and here[0].dtype != torch.float64 and has_triton():
        from flce_ops.triton import launch_scale_in_place

        launch_scale_in_place(here, factor)
    else:
        for grad in here:
            grad.mul_(factor)
    return grads
