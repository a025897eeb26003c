"""Sizes: arithmetic on the host, and sizes and numbers that a compiled graph learns when it runs.

Triton's cdiv and next_power_of_2 also take its constants, and so 3 to 10 us.

The rows that a boolean mask leaves, or the result of .item(), are known only when a graph runs. torch calls them
unbacked. A condition on one cannot choose a branch while the graph is made. A condition that an argument must fulfil is
assumed then, and the graph asserts it when it runs: meta/checks.py.
"""

from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below a positive `number`."""
    return 1 << (number - 1).bit_length()


SYMBOLIC = (SymFloat, SymInt)


def known_only_when_it_runs(*numbers: Any) -> bool:
    """Whether one of the numbers depends on data."""
    for number in numbers:
        if isinstance(number, SYMBOLIC):
            from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

            if has_free_unbacked_symbols(number):
                return True
    return False


def finite_in(dtype: torch.dtype, value: float) -> bool:
    """Whether a number is finite in `dtype`. Dynamo traces this function, too. A number from data counts as finite: if
    `dtype` rounds it to infinity, the graph divides by infinity.
    """
    largest = torch.finfo(dtype).max
    if not (torch.compiler.is_compiling() or isinstance(value, SYMBOLIC)):
        return -largest <= value <= largest
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(-largest <= value) and guard_or_true(value <= largest)


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor is of a FakeTensorMode that a user entered, and nothing records a graph."""
    if not hasattr(tensor, "fake_mode") or torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is None
