"""A number in two float32: the twin of flce_ops/math/two_sum.py, of numbers that a kernel has in float64."""

import triton
import triton.language as tl


@triton.jit
def in_two_float32(value):
    """Its float32, and in float64 what that rounding took from it, 0 where it is not finite."""
    rounded = value.to(tl.float32)
    return rounded, tl.where(tl.abs(rounded) < float("inf"), value - rounded.to(tl.float64), 0.0)
