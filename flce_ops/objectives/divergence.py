"""Divergences between a teacher's distribution p and a student's distribution q, defined by the entries of a row of
classes.

Sums run over the classes of a row, with 0 log 0 = 0. G is the gradient by the student's logits:

    "forward"   KL(p || q) = sum p (log p - log q)             G = q sum p - p
    "reverse"   KL(q || p) = sum q (log q - log p)             G = q (log q - log p - K)                K = KL(q || p)
    "jsd"       m = beta p + (1 - beta) q
                beta KL(p || m) + (1 - beta) KL(q || m)        G = (1 - beta) q (log q - log m - K)     K = KL(q || m)
    "tv"        sum |p - q| / 2                                G = q (K - d)         d = [q < p], K = sum q d
    "nla"       -log sum min(p, q), the acceptance rate        G = q S - d e^(min(log q, log p) + loss)
                                                               S = sum d min(p, q) / sum min(p, q)
    "cross_entropy"   -sum p log q, of class probabilities     G = q sum p - p

For "jsd", the derivative of both terms by q_j is (1 - beta) (log q_j - log m_j), because the derivatives through m
cancel. The softmax turns a derivative d by q into q (d - sum q d). sum(p) is 1 unless the given probabilities do not
add up to 1, as in a truncated top-k.

Where p_j = q_j, total variation has a kink. There d is 1/2, the middle of its subgradients. "tv" and "nla" share d,
because min(p, q) = (p + q - |p - q|) / 2. The derivative of |p - q| / 2 is sign(q - p) / 2, and -d is that minus 1/2:
a constant of the row does not change G. With this constant, K - d loses no digits to cancellation if the acceptance
rate is near 0. "nla" compares logarithms and sums e^(min(log q, log p) - shift), with a shift of the row: its rate may
be e^-1000, as both models' probabilities may be where the other is sure. The shift is 0 unless the rate is near 0.

Logarithms, their differences, d and K are in nats in ATen, and in base 2 in a kernel. K is divided by the sum of the
stored, rounded q. Without this, G would have an error of 1e-6 K in rows where the exact G is 0. These are rows where
log q - log p (or log q - log m) is equal for all classes with probability: both models agree, or a confident student
disagrees.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from .cross_entropy import RowFunction, log, where

Kind = Literal["forward", "reverse", "jsd", "tv", "nla"]  # the kinds that linear_kl_div takes
KINDS = get_args(Kind)
# A row is shifted if all its logarithms of min(p, q) are below this: the sum keeps its digits down to e^-87.
LEAST_UNSHIFTED = -60.0


def once(function: Callable) -> Callable:
    """Keeps a function's result as an attribute of its first argument, a block's logarithms: the sums and the gradient
    of the block call it with the same tensor.
    """
    name = function.__name__

    def run(logarithms: Tensor, *others: Any) -> Any:
        if name not in vars(logarithms):
            vars(logarithms)[name] = function(logarithms, *others)
        return vars(logarithms)[name]

    return run


exp, minimum = once(torch.exp), torch.minimum


def nats(difference: Tensor) -> Tensor:
    return difference


@once
def log_ratio(log_q: Tensor, log_p: Tensor, q: Tensor) -> Tensor:
    """log q - log p, or 0 where q is 0."""
    return torch.where(q == 0.0, 0.0, log_q - log_p)


@once
def log_ratios_to_mixture(log_q: Tensor, log_p: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """log q - log m = -log(1 - beta + beta e^a), log p - log m = -log(beta + (1 - beta) e^-a), with a = log p - log q.

    The one whose distribution has more of the class is -log1p(w (e^-|a| - 1)) with w = beta or 1 - beta, and the other
    is less by |a|. In this form the rounding error is relative to |a|. If log m were computed first, the error would be
    relative to the size of log q; if the logarithms of beta and 1 - beta were added, to those, and equal models would
    not have 0.
    """
    a = log_p - log_q
    larger = a.abs().neg_().expm1_().mul_(torch.where(a > 0.0, 1.0 - beta, beta)).log1p_().neg_()
    return larger - a.clamp(min=0.0), larger + a.clamp(max=0.0)


def below(q: Tensor, p: Tensor) -> Tensor:
    """d of "tv" and "nla": 1 where q < p, 0 where q > p, 1/2 where they are equal."""
    return torch.sign(p - q).add_(1.0).mul_(0.5)


class EntryFunction(RowFunction):
    words = {name: name for name in ("abs", "log", "minimum", "where", "nats", "log_ratio", "below")}
    words |= {"exp": "exp2", "log_ratios_to_mixture": "log2_ratios_to_mixture"}


class Divergence:
    """A divergence, in three functions: the terms that an entry adds to the sums of its row (the last sum is that of p
    or of q); the divergence and K from these sums; and G of an entry.
    """

    of_student: ClassVar[bool] = True  # K is a sum over the student's distribution q
    of_given_p: ClassVar[bool] = False  # entry functions get p in place of log p
    # of_entry gets a shift in place of beta, and the last of the row's sums is not a sum but the shift
    shifted: ClassVar[bool] = False
    kinked: ClassVar[bool] = False  # the gradient jumps where p = q
    sums: ClassVar[int] = 2
    matrices: ClassVar[int] = 3  # matrices of a chunk's size that exist at once in ATen, including log q and log p
    of_entry: ClassVar[EntryFunction]
    of_sums: ClassVar[EntryFunction]  # returns the divergence in nats, and the row's K, which G subtracts
    gradient: ClassVar[EntryFunction]  # gets K, or for a shifted kind the pair of S and the logarithm of the divergence
    offset_of_sums: ClassVar[EntryFunction | None] = None  # the divergence in the unit of log q, for a shifted kind


class ForwardKL(Divergence):
    """K is the mass of p."""

    of_student = False

    @EntryFunction
    def of_entry(log_q, log_p, beta):
        p = exp(log_p)
        return where(p == 0.0, 0.0, p * (log_p - log_q)), p

    @EntryFunction
    def of_sums(sums, beta):
        first, mass = sums
        return nats(first), mass

    @EntryFunction
    def gradient(log_q, log_p, number, scale, beta):
        return (exp(log_q) * number - exp(log_p)) * scale


class ClassProbabilities(Divergence):
    """K is the sum of p. p may be negative. p may be the user's tensor, so nothing is written to it."""

    of_student, of_given_p = False, True

    @EntryFunction
    def of_entry(log_q, p, beta):
        return where(p == 0.0, 0.0, -p * log_q), p

    of_sums = ForwardKL.of_sums

    @EntryFunction
    def gradient(log_q, p, number, scale, beta):
        return (exp(log_q) * number - p) * scale


class ReverseKL(Divergence):
    @EntryFunction
    def of_entry(log_q, log_p, beta):
        q = exp(log_q)
        return q * log_ratio(log_q, log_p, q), q

    @EntryFunction
    def of_sums(sums, beta):
        first, mass = sums
        return nats(first / mass), first / mass

    @EntryFunction
    def gradient(log_q, log_p, number, scale, beta):
        q = exp(log_q)
        return q * (log_ratio(log_q, log_p, q) - number) * nats(scale)


class JensenShannon(Divergence):
    sums, matrices = 3, 4

    @EntryFunction
    def of_entry(log_q, log_p, beta):
        q, p = exp(log_q), exp(log_p)
        student, teacher = log_ratios_to_mixture(log_q, log_p, beta)
        return where(p == 0.0, 0.0, p * teacher), where(q == 0.0, 0.0, q * student), q

    @EntryFunction
    def of_sums(sums, beta):
        first, second, mass = sums
        return nats(beta * first + (1.0 - beta) * second / mass), second / mass

    @EntryFunction
    def gradient(log_q, log_p, number, scale, beta):
        q = exp(log_q)
        student, _ = log_ratios_to_mixture(log_q, log_p, beta)
        return q * (where(q == 0.0, 0.0, student) - number) * nats((1.0 - beta) * scale)


class TotalVariation(Divergence):
    kinked, sums = True, 3

    @EntryFunction
    def of_entry(log_q, log_p, beta):
        q, p = exp(log_q), exp(log_p)
        return abs(p - q), below(q, p) * q, q

    @EntryFunction
    def of_sums(sums, beta):
        distance, number, mass = sums
        # a clamp on a GPU drops nan, so `number` has none for a teacher of nan
        return 0.5 * distance, number / nats(mass) + 0.0 * distance

    @EntryFunction
    def gradient(log_q, log_p, number, scale, beta):
        q = exp(log_q)
        return q * (nats(number) - below(q, exp(log_p))) * scale


class NegativeLogAcceptance(Divergence):
    """K is S. Two logarithms of -inf have no difference, and no part in the sums."""

    kinked, shifted, sums, matrices = True, True, 4, 4

    @EntryFunction
    def of_entry(log_q, log_p, shift):
        least = exp(minimum(log_q, log_p) - shift)
        return least, where(least == 0.0, 0.0, below(log_q, log_p) * least), exp(log_q)

    @EntryFunction
    def of_sums(sums, beta):
        overlap, number, mass, shift = sums
        return -log(overlap / mass) - nats(shift), number / nats(overlap)

    @EntryFunction
    def offset_of_sums(sums):
        overlap, _, mass, shift = sums
        return log(mass / overlap) / nats(1.0) - shift

    @EntryFunction
    def gradient(log_q, log_p, number, scale, beta):
        share, offset = number
        least = exp(minimum(log_q, log_p) + offset)
        return (exp(log_q) * nats(share) - where(least == 0.0, 0.0, below(log_q, log_p) * least)) * scale


DIVERGENCES: dict[str, type[Divergence]] = {
    "forward": ForwardKL,
    "reverse": ReverseKL,
    "jsd": JensenShannon,
    "tv": TotalVariation,
    "nla": NegativeLogAcceptance,
    "cross_entropy": ClassProbabilities,
}


# of cross-entropy; a target of class probabilities refuses the others
OPTIONS_OF_PROBABILITIES = ("label_smoothing",)


def smoothed_and_weighted(
    target: Tensor,  # (..., V)
    weight: Tensor | None,  # (V,)
    label_smoothing: float,
    dtype: torch.dtype,  # dtype of the sums
) -> Tensor:  # (..., V), p
    """Returns p: `target` itself if no option changes it; otherwise a new matrix, in `dtype` or wider."""
    target = target.detach()
    if label_smoothing == 0.0 and weight is None:
        return target
    weight = target.new_ones(target.shape[-1:], dtype=dtype) if weight is None else weight.detach().to(dtype)
    p = target * (weight * (1.0 - label_smoothing))
    return p if label_smoothing == 0.0 else p.add_(weight * (label_smoothing / target.shape[-1]))
