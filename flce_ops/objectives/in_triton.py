"""The words of language.py in a kernel. `at` is (tokens, mask): the tokens of the block of rows."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def where(condition, values, otherwise):
    return tl.where(condition, values, otherwise)


@triton.jit
def expm1(x):
    """e^x - 1, near 0 by its series: the first term left out is below 2e-8 of the sum."""
    series = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(tl.abs(x) < 0.35, series, tl.exp(x) - 1.0)


@triton.jit
def clamp(values, lowest, highest):
    return tl.where(values < lowest, lowest, tl.where(values > highest, highest, values))


@triton.jit
def constant(values):
    return values


@triton.jit
def number(pointer, otherwise: tl.constexpr = 1.0):
    """The number of an option at `pointer`, or `otherwise` where there is None."""
    if pointer is None:
        return otherwise
    else:
        return tl.load(pointer).to(tl.float32)


@triton.jit
def of_tokens(pointer, at):
    return tl.load(pointer + at[0], mask=at[1], other=0.0)


@triton.jit
def times(factor, values):
    return factor * values


def in_kernel(values: Any) -> Any:
    """An objective as an argument of a kernel, which is compiled for each of the names among its options."""
    if isinstance(values, tuple):
        return type(values)(*map(in_kernel, values))
    return tl.constexpr(values) if isinstance(values, str) else values
