"""The words of objectives for kernels. `at` is (tokens, mask): the tokens of the block of rows."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LN2 = tl.constexpr(0.6931471805599453)
LOG2 = tl.constexpr("lg2.approx.f32 $0, $1;")
LARGE = tl.constexpr(64.0)  # in base 2: for a larger a, 1 + 2^a equals 2^a in float32


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def where(condition, values, otherwise):
    return tl.where(condition, values, otherwise)


@triton.jit
def constant(values):
    return values


@triton.jit
def number(pointer, otherwise: tl.constexpr = 1.0):
    """The option's number at `pointer`, or `otherwise` if the pointer is None."""
    if pointer is None:
        return otherwise
    else:
        return tl.load(pointer).to(tl.float32)


@triton.jit
def of_tokens(pointer, at):
    return tl.load(pointer + at[0], mask=at[1], other=0.0)


@triton.jit
def exp2(x):
    return tl.exp2(x)


@triton.jit
def nats(difference):
    """Converts a difference of logarithms from base 2."""
    return difference * LN2


@triton.jit
def log_ratio(log_q, log_p, q):
    return tl.where(q == 0.0, 0.0, log_q - log_p)


@triton.jit
def log2_within_2_22(x):
    """log2 within 2^-22: absolute between 0.5 and 2, relative elsewhere. That is enough, because the stored logits have
    errors of up to 2^-12.

    tl.log2 is a polynomial of 25 instructions an entry, a third of the work of "jsd".
    """
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(LOG2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log2_ratios_to_mixture(log2_q, log2_p, beta):
    """(log q - log m, log p - log m) in base 2, for entries where p or q is not 0. divergence.py explains the form."""
    a = log2_p - log2_q
    far = a > LARGE
    mixture = log2_within_2_22((1.0 - beta) + beta * tl.exp2(tl.where(far, 0.0, a)))  # log m - log q
    mixture = tl.where(far, a + tl.log2(beta), mixture)
    return -mixture, tl.where(far, -tl.log2(beta), a - mixture)


@triton.jit
def abs(x):
    return tl.abs(x)


@triton.jit
def minimum(x, y):
    """nan where x or y is."""
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def below(q, p):
    """1 where q < p, 0 where q > p, 1/2 where they are equal, as in divergence.py; exact unless 0 < |p - q| < 2^-127.

    The multiply-add and the clamp to [0, 1] compile to one saturating instruction.
    """
    return tl.minimum(tl.maximum((p - q) * 2.0**126 + 0.5, 0.0), 1.0)
