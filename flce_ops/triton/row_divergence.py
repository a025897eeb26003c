"""flce_ops/math/divergences.py in a kernel: an entry's part of the divergence, and its entry of G.

With p the teacher's and q the student's probability, differences of logarithms in base 2, and 0 log 0 = 0:

    kind      sums of a row                                 K                G (but for the row scale)
    forward   p (log p - log q), p                          second           q K - p
    reverse   q (log q - log p), q                          first / second   q (log q - log p - K)
    jsd       p (log p - log m), q (log q - log m), q       second / third   (1 - beta) q (log q - log m - K)
    cross_entropy   -p log q, p                             second           q K - p

"cross_entropy" takes p, which class weights may have made negative, where the others take log p.

K is divided by the sum of q because the stored q are rounded and do not add up to 1. Where log q - log p or log q -
log m is the same for all that count (models that agree; a confident student that disagrees) G is 0, and 1e-6 of K would
stay.

The kernels that call it hand KIND and beta through: what a divergence is stands here and in math/divergences.py only.
"""

import triton
import triton.language as tl

from flce_ops.triton.logits_gemm import LN2

# n rows of a chunk, v columns of a tile

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2 = tl.constexpr("lg2.approx.f32 $0, $1;")
LARGE = tl.constexpr(64.0)  # e^a against 1, in base 2: what it is beside no longer counts


@triton.jit
def log2_within_2_22(x):
    """Within 2^-22, absolute between 0.5 and 2 and relative elsewhere; the stored logits are within 2^-12.

    tl.log2 is a polynomial of 25 instructions an entry, a third of what "jsd" does to one.
    """
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(LOG2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log_ratios_to_mixture(log2_q, log2_p, beta):
    """(log q - log m, log p - log m) of entries with p or q; math/divergences.py says why from a = log p - log q."""
    a = log2_p - log2_q
    far = a > LARGE
    mixture = log2_within_2_22((1.0 - beta) + beta * tl.exp2(tl.where(far, 0.0, a)))  # log m - log q
    mixture = tl.where(far, a + tl.log2(beta), mixture)
    return -mixture, tl.where(far, -tl.log2(beta), a - mixture)


@triton.jit
def divergence_terms(log2_q, log2_p, beta, KIND: tl.constexpr):
    """What an entry adds to the sums of its row, of which only "jsd" has a third; differences in base 2."""
    q, p = tl.exp2(log2_q), tl.exp2(log2_p)
    if KIND == "forward":
        return tl.where(p == 0.0, 0.0, p * (log2_p - log2_q)), p, p
    elif KIND == "cross_entropy":
        return tl.where(log2_p == 0.0, 0.0, -log2_p * log2_q), log2_p, log2_p
    elif KIND == "reverse":
        return tl.where(q == 0.0, 0.0, q * (log2_q - log2_p)), q, q
    else:
        student, teacher = log_ratios_to_mixture(log2_q, log2_p, beta)
        return tl.where(p == 0.0, 0.0, p * teacher), tl.where(q == 0.0, 0.0, q * student), q


@triton.jit
def divergence_gradient(log2_q, log2_p, row_number, beta, KIND: tl.constexpr):
    """G of an entry; `row_number` is K."""
    q = tl.exp2(log2_q)
    if KIND == "forward":
        return q * row_number - tl.exp2(log2_p)
    elif KIND == "cross_entropy":
        return q * row_number - log2_p
    elif KIND == "reverse":
        return q * (tl.where(q == 0.0, 0.0, log2_q - log2_p) - row_number) * LN2
    else:
        student, _ = log_ratios_to_mixture(log2_q, log2_p, beta)
        return q * (tl.where(q == 0.0, 0.0, student) - row_number) * ((1.0 - beta) * LN2)


@triton.jit
def divergence_of_sums(first, second, third, beta, KIND: tl.constexpr):
    """(divergence in nats, K) of the sums over all classes."""
    if KIND == "forward" or KIND == "cross_entropy":
        return first * LN2, second
    elif KIND == "reverse":
        return first / second * LN2, first / second
    else:
        return (beta * first + (1.0 - beta) * second / third) * LN2, second / third


def count_of_sums(kind: str) -> int:
    return 3 if kind == "jsd" else 2
