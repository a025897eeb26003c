"""Casts operands as autocast casts those of F.linear, and makes the operators' kernels on autocast's keys."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..math.options import TEACHER
from ..meta.call import Arguments
from ..meta.checks import is_dense

OPERANDS = {"input", "linear_weight", "linear_bias", *TEACHER[:3]}


has_autocast = functools.cache(torch.amp.is_autocast_available)


def autocast_operands(device_type: str, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts the operands as autocast does for F.linear: floating tensors, but not float64 ones, to autocast's dtype."""
    if not (has_autocast(device_type) and torch.is_autocast_enabled(device_type)):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and is_dense(tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        else tensor
        for tensor in operands
    )


def cast_operands(call: Any, device_type: str) -> None:
    """Casts the operands of an entry operator's call in place."""
    operands = {name: value for name, value in vars(call).items() if name in OPERANDS}
    vars(call).update(zip(operands, autocast_operands(device_type, *operands.values())))


def autocast_kernel(arguments: type[Arguments], device_type: str) -> Callable:
    """An autocast kernel: casts the operands, and switches autocast off for the products inside.

    Backward operators and operators of given logits cast nothing: backward gets the operands that forward used, and
    given logits keep the caller's dtype.
    """
    casts = [index for name, index in arguments.index.items() if name in OPERANDS]
    if "_backward" in arguments.op:
        casts = []

    def run(*args, **kwargs):
        values = arguments.bind(*args, **kwargs).values()
        for index, operand in zip(casts, autocast_operands(device_type, *(values[index] for index in casts))):
            values[index] = operand
        on = torch.is_autocast_enabled(device_type)  # an operator may be called on this key with autocast off
        torch.set_autocast_enabled(device_type, False)  # torch.autocast would take 10 us
        try:
            return arguments.dispatched(values)
        finally:
            torch.set_autocast_enabled(device_type, on)

    return run
