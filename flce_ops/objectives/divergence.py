"""The divergences between a teacher's distribution p and a student's q, entry by entry of a row of classes.

With 0 log 0 = 0, sums over the classes of a row, and the gradient G by the student's logits:

    "forward"   KL(p || q) = sum p (log p - log q)             G = q sum p - p
    "reverse"   KL(q || p) = sum q (log q - log p)             G = q (log q - log p - K)                K = KL(q || p)
    "jsd"       m = beta p + (1 - beta) q
                beta KL(p || m) + (1 - beta) KL(q || m)        G = (1 - beta) q (log q - log m - K)     K = KL(q || m)
    "tv"        sum |p - q| / 2                                G = q (d - K)        d = -[q < p], K = sum q d
    "nla"       -log sum min(p, q), the acceptance rate        G = q (d - K) / sum min(p, q)
    "cross_entropy"   -sum p log q, of class probabilities     G = q sum p - p

Of "jsd" the derivative by q_j of both terms together is (1 - beta) (log q_j - log m_j), since m's own derivatives
cancel, and the softmax takes a derivative d by q to q (d - sum q d). sum(p) is 1 unless probabilities were given that
do not add up to 1, such as a truncated top-k.

Where p_j = q_j total variation has a kink: d is -1/2 there, in the middle of its subgradients. As min(p, q) is half of
p + q - |p - q|, the two share d, which is sign(q - p) / 2 less 1/2: a constant of the row has no part in G, and so
d - K does not cancel where hardly anything is accepted.

Logarithms, differences of them, d and K are in nats in ATen, in base 2 in a kernel. There K is divided by the sum of
the q that are stored, which are rounded: where log q - log p or log q - log m is the same for all that count (models
that agree; a confident student that disagrees) G is 0, and 1e-6 of K would stay.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from .language import RowFunction, log, where

Kind = Literal["forward", "reverse", "jsd", "tv", "nla"]  # what linear_kl_div takes
KINDS = get_args(Kind)


def once(function: Callable) -> Callable:
    """`function` of the logarithms of a block, which remember the result: its sums and its gradient read the same."""
    name = function.__name__

    def run(logarithms: Tensor, *others: Any) -> Any:
        if name not in vars(logarithms):
            vars(logarithms)[name] = function(logarithms, *others)
        return vars(logarithms)[name]

    return run


exp = once(torch.exp)


def nats(difference: Tensor) -> Tensor:
    return difference


@once
def log_ratio(log_q: Tensor, log_p: Tensor, q: Tensor) -> Tensor:
    """log q - log p, 0 where q is."""
    return torch.where(q == 0.0, 0.0, log_q - log_p)


@once
def log_ratios_to_mixture(log_q: Tensor, log_p: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """log q - log m = -log(1 - beta + beta e^a), log p - log m = -log(beta + (1 - beta) e^-a), with a = log p - log q.

    So written both are exact to their own size, which beta bounds; log m itself would bring an error of log q's size.
    """
    a, own, others = log_p - log_q, torch.log1p(-beta), beta.log()
    return log_of_sum(a + others, own).neg_(), log_of_sum(own - a, others).neg_()


def log_of_sum(x: Tensor, y: Tensor) -> Tensor:
    """torch.logaddexp, whose bits on a CPU depend on where in memory a number stands."""
    return torch.maximum(x, y).add_((x - y).abs_().neg_().exp_().log1p_())


def side(q: Tensor, p: Tensor) -> Tensor:
    """-1 where q < p, 0 where q > p."""
    return torch.sign(q - p).sub_(1.0).mul_(0.5)


class EntryFunction(RowFunction):
    words = {name: name for name in ("log", "where", "nats", "log_ratio", "side")}
    words |= {"exp": "exp2", "log_ratios_to_mixture": "log2_ratios_to_mixture"}


class Divergence:
    """What an entry adds to the sums of its row, the mass of p or q last; what these come to; G of an entry."""

    of_student: ClassVar[bool] = True  # K is a divergence of q
    of_given_p: ClassVar[bool] = False  # which stands for log p
    sums: ClassVar[int] = 2
    matrices: ClassVar[int] = 3  # of a chunk's size that exist at once in ATen, log q and log p among them
    of_entry: ClassVar[EntryFunction]
    of_sums: ClassVar[EntryFunction]  # the divergence in nats, and K
    gradient: ClassVar[EntryFunction]
    scale_of_sums: ClassVar[EntryFunction | None] = None  # which G is multiplied by, e^divergence; None for 1


class Forward(Divergence):
    """Its K is the mass of p."""

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
    """Its K is the mass of p, which may be negative and, as it may be the user's tensor, is not written to."""

    of_student, of_given_p = False, True

    @EntryFunction
    def of_entry(log_q, p, beta):
        return where(p == 0.0, 0.0, -p * log_q), p

    of_sums = Forward.of_sums

    @EntryFunction
    def gradient(log_q, p, number, scale, beta):
        return (exp(log_q) * number - p) * scale


class Reverse(Divergence):
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
    sums = 3

    @EntryFunction
    def of_entry(log_q, log_p, beta):
        q, p = exp(log_q), exp(log_p)
        return 0.5 * where(q < p, p - q, q - p), side(q, p) * q, q

    @EntryFunction
    def of_sums(sums, beta):
        distance, number, mass = sums
        return distance, number / mass

    @EntryFunction
    def gradient(log_q, log_p, number, scale, beta):
        q = exp(log_q)
        return q * (side(q, exp(log_p)) - number) * nats(scale)


class NegativeLogAcceptance(TotalVariation):
    @EntryFunction
    def of_entry(log_q, log_p, beta):
        q, p = exp(log_q), exp(log_p)
        return where(q < p, q, p), side(q, p) * q, q

    @EntryFunction
    def of_sums(sums, beta):
        overlap, number, mass = sums
        return -log(overlap / mass), number / mass

    @EntryFunction
    def scale_of_sums(sums):
        overlap, _, mass = sums
        return mass / overlap


DIVERGENCES: dict[str, type[Divergence]] = {
    "forward": Forward,
    "reverse": Reverse,
    "jsd": JensenShannon,
    "tv": TotalVariation,
    "nla": NegativeLogAcceptance,
    "cross_entropy": ClassProbabilities,
}
