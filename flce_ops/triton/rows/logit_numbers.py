"""Logits in a kernel: from the products of the GEMM, by logit_scale and softcap; and their lse_pair (meta/call.py)."""

import triton
import triton.language as tl

from ...math.options import LogitOptions
from ...objectives.in_triton import LN2, number

LOG2E = tl.constexpr(1.4426950408889634)
# Coefficients of (tanh(y) / y - 1) / w in powers of w = (2 y log2 e)^2, for w < 2.5: minimax, relative to tanh(y).
TANH = tl.constexpr((-4.0037299e-2, 1.9218430e-3, -9.1303815e-5, 3.4282380e-6))


@triton.jit
def base2_logits(acc, bias, logit_options, numbers, UNIT: tl.constexpr = LOG2E):
    """Returns (z UNIT, dz/du / logit_scale) for the raw products `acc`. The second is meaningful only with a softcap.

    `logit_options`, LogitOptions or LogitNumbers, says which options there are. `numbers` are these options, loaded:
    scalars, or numbers of rows that broadcast.
    """
    logit_scale, softcap = numbers.logit_scale, numbers.softcap
    if bias is not None:
        acc = acc + bias
    if logit_options.softcap is not None:
        # With e = exp(2 y): tanh y = 1 - 2 / (1 + e) and 1 - tanh^2 = 4 e / (1 + e)^2, which does not cancel where tanh
        # is near 1. e stays finite; from 2^126 on the slope is 0 to any digit.
        y2 = acc * (2.0 * LOG2E * logit_scale / softcap)
        e = tl.exp2(tl.where(y2 > 126.0, 126.0, y2))
        inverse = 1.0 / (1.0 + e)
        # Below |y| = 0.55 that form of tanh cancels: its absolute error is 6e-8 whatever y is. There z is u times
        # tanh(y) / y, a polynomial in y2^2 with a relative error of 3e-8, so a large cap keeps all digits of u. The
        # polynomial adds 8 instructions to the 11 to 15 that the other form takes.
        square = y2 * y2
        tanh_by_y = 1.0 + square * (TANH[0] + square * (TANH[1] + square * (TANH[2] + square * TANH[3])))
        small = acc * (logit_scale * UNIT) * tanh_by_y
        z = tl.where(square < 2.5, small, (1.0 - 2.0 * inverse) * (softcap * UNIT))
        dz_du = 4.0 * inverse * (e * inverse)
    else:
        z = acc * (logit_scale * UNIT)
        dz_du = acc
    return z, dz_du


@triton.jit
def loaded(logit_options, otherwise: tl.constexpr = 1.0):
    """LogitOptions with numbers in place of pointers, `otherwise` in place of None."""
    return LogitOptions(number(logit_options.softcap, otherwise), number(logit_options.logit_scale, otherwise))


@triton.jit
def capped(z2, softcap):
    """(z of logits before a softcap, dz/du / logit_scale), all in base 2."""
    cap = number(softcap)
    return base2_logits(z2, None, LogitOptions(cap, 1.0), LogitOptions(cap, LN2))  # type: ignore[arg-type]


@triton.jit
def rescaled(reference, log_sum, FACTOR: tl.constexpr):
    """An lse_pair times FACTOR. What the rounding of the reference takes goes into the other number."""
    factor = tl.full(reference.shape, FACTOR, tl.float64)  # a plain Python number would be rounded to float32
    product = reference.to(tl.float64) * factor
    rounded = product.to(tl.float32)
    rest = tl.where(tl.abs(rounded) < float("inf"), product - rounded.to(tl.float64), 0.0)
    return rounded, (log_sum.to(tl.float64) * factor + rest).to(tl.float32)


@triton.jit
def store_pair(pointer, token, reference2, log2_sum, mask, inside):  # out (N, 2)
    """Stores an lse_pair in nats; 0 where `mask` is not set."""
    reference, log_sum = rescaled(reference2, log2_sum, LN2)
    tl.store(pointer + 2 * token, tl.where(mask, reference, 0.0), mask=inside)
    tl.store(pointer + 2 * token + 1, tl.where(mask, log_sum, 0.0), mask=inside)


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
    reference, log_sum = rescaled(reference2, log2_sum, LN2)
    ln2 = tl.full(reference2.shape, 0.6931471805599453, tl.float32)
    # fma(..., 0) rounds the product. A plain product and the subtraction below would be compiled to one FMA, which does
    # not round the product.
    target_logit = tl.fma(target_logit2, ln2, tl.zeros_like(ln2))
    distance = (reference - target_logit) + log_sum
    return tl.where(distance < 0.0, 0.0, distance)
