"""Operands as autocast hands them to F.linear, and the operators' kernels on autocast's keys."""

from collections.abc import Callable

import torch
from torch import Tensor

from flce_ops.meta.checks import is_dense
from flce_ops.support.torch_private import (
    without_autocast,
)


def autocast_operands(device_type: str, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands as autocast hands them to F.linear: floating, but for float64, in the autocast dtype."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and is_dense(tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        else tensor
        for tensor in operands
    )


def autocast_kernel(op: torch._ops.OpOverload, device_type: str) -> Callable:
    """The autocast kernel of an inner operator (input, linear_weight, target, linear_bias, ...)."""

    def run(input, linear_weight, target, linear_bias=None, *args, **kwargs):
        input, linear_weight, linear_bias = autocast_operands(device_type, input, linear_weight, linear_bias)
        with without_autocast(device_type):
            return op(input, linear_weight, target, linear_bias, *args, **kwargs)

    return run
