"""Numbers among the options (logit_scale, softcap, z_loss, ...), which the inner operators take as 0-d tensors.

A number in a compiled graph is a constant of it: another value is another compilation. A 0-d tensor is an input.
torch.compile turns a Python float that changed between two calls into a SymFloat, and arithmetic of a tensor with a
SymFloat into an input of the graph, so that from the third value on a graph is found that fits.

    logit_scale = 30, softcap = None   ->   tensor(30.), None          None: the option is off and costs nothing
"""

from typing import Any

import torch
from torch import SymFloat, Tensor

from flce_ops.math.options import LogitOptions
from flce_ops.math.precision import accumulation_dtype

Number = float  # an int will do, and the SymFloat above, whose products with tensors torch's stubs do not have


def scalar(value: Number, like: Tensor) -> Tensor:  # ()
    """`value` on the device and in the accumulation dtype of `like`."""
    dtype = accumulation_dtype(like.dtype)
    if isinstance(value, SymFloat):
        return torch.ones((), dtype=dtype, device=like.device) * value
    return torch.full((), value, dtype=dtype, device=like.device)


def scalar_unless(neutral: float, value: Number | None, like: Tensor) -> Tensor | None:  # ()
    """`scalar(value)`, or None where the option does nothing: a value that is known, and neutral."""
    if value is None or (not isinstance(value, SymFloat) and value == neutral):
        return None
    return scalar(value, like)


def normalizer_tensor(normalizer: Tensor | Number | None, like: Tensor) -> Tensor | None:  # ()
    """The entries take a tensor. Dynamo sees this function, and to it a float that changes still looks like a float."""
    if normalizer is None or isinstance(normalizer, Tensor):
        return normalizer
    if torch.compiler.is_compiling():
        return scalar(1.0, like) * normalizer
    return scalar(normalizer, like)


def logit_options(numbers: Any, like: Tensor) -> LogitOptions:
    """LogitNumbers or LossNumbers as the inner operators take them. The temperature, behind the cap, goes into both:

    cap tanh(scale u / cap) / tau = (cap / tau) tanh((scale / tau) u / (cap / tau))
    """
    divisor = scalar_unless(1.0, numbers.temperature, like)
    cap = None if numbers.softcap is None else scalar(numbers.softcap, like)
    if divisor is None:
        return LogitOptions(cap, scalar_unless(1.0, numbers.logit_scale, like))
    # tensors are divided: a quotient of SymFloats is a constant of the graph on torch 2.11
    return LogitOptions(None if cap is None else cap / divisor, scalar(numbers.logit_scale, like) / divisor)
