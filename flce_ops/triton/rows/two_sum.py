"""Splits a float64 number of a kernel into two float32 numbers whose sum it is. `two_sum` in
flce_ops/math/statistics.py is the same for ATen.
"""

import triton
import triton.language as tl

from ...objectives.in_triton import LN2


@triton.jit
def in_two_float32(value):
    """Returns the number as float32, and in float64 what that rounding took; 0 if it is not finite."""
    rounded = value.to(tl.float32)
    return rounded, tl.where(tl.abs(rounded) < float("inf"), value - rounded.to(tl.float64), 0.0)


@triton.jit
def rescaled(high, low, FACTOR: tl.constexpr):
    """(high + low) * FACTOR, from two float32 to two float32."""
    factor = tl.full(high.shape, FACTOR, tl.float64)  # a plain Python number would be rounded to float32
    rounded, rest = in_two_float32(high.to(tl.float64) * factor)
    return rounded, (low.to(tl.float64) * factor + rest).to(tl.float32)


@triton.jit
def lse_in_nats(reference2, log2_sum):
    """lse and what its rounding took, both float32, from a reference and the log of a sum relative to it, in base 2.

    Every kernel that computes the lse of a row gets the same bits.
    """
    ln2 = tl.full(reference2.shape, 0.6931471805599453, tl.float64)
    lse, rest = in_two_float32((reference2.to(tl.float64) + log2_sum.to(tl.float64)) * ln2)
    return lse, rest.to(tl.float32)


@triton.jit
def sum_from_lse(logit_sum2, class_weight_sum, lse2):
    """sum_j w_j (z_j - lse) in nats, from sum_j w_j z_j and lse in base 2. Logits of half operands with a large offset
    have lost the digits that this difference loses.
    """
    return (logit_sum2 - class_weight_sum * lse2) * LN2


@triton.jit
def surprisal_in_nats(target_logit2, reference2, log2_sum):
    """The same bits as `surprisal` in flce_ops/math/statistics.py: the target's logit is rounded to nats before the
    difference.
    """
    lse, rest = lse_in_nats(reference2, log2_sum)
    ln2 = tl.full(reference2.shape, 0.6931471805599453, tl.float32)
    # fma(..., 0) rounds the product. A plain product and the subtraction below would be compiled to one FMA, which does
    # not round the product.
    target_logit = tl.fma(target_logit2, ln2, tl.zeros_like(ln2))
    distance = (lse - target_logit) + rest
    return tl.where(distance < 0.0, 0.0, distance)
