"""A number in two float32: the twin of flce_ops/math/two_sum.py, of numbers that a kernel has in float64."""

import triton
import triton.language as tl


@triton.jit
def in_two_float32(value):
    """Its float32, and in float64 what that rounding took from it, 0 where it is not finite."""
    rounded = value.to(tl.float32)
    return rounded, tl.where(tl.abs(rounded) < float("inf"), value - rounded.to(tl.float64), 0.0)


@triton.jit
def rescaled(high, low, FACTOR: tl.constexpr):
    """(high + low) FACTOR, of two float32 in two float32."""
    factor = tl.full(high.shape, FACTOR, tl.float64)  # as a number it would be rounded to float32
    rounded, rest = in_two_float32(high.to(tl.float64) * factor)
    return rounded, (low.to(tl.float64) * factor + rest).to(tl.float32)
