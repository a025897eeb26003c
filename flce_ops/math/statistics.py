"""Statistics of rows of logits: what the forward operator must return for them, and how they follow from its results.

With z the row of logits (scaled, capped and divided by the temperature), p = softmax(z) and V classes:

    lse               log sum_j exp z_j
    entropy           -sum_j p_j log p_j  =  lse - sum_j p_j z_j
    log_sum_sq_probs  log sum_j p_j^2     =  logsumexp_j 2 z_j - 2 lse
    mean_logit        sum_j z_j / V

If ranks share the vocabulary, with s_r = exp(lse_r - lse) the part of the softmax's denominator on rank r:

    entropy           sum_r s_r (entropy_r - log s_r)
    log_sum_sq_probs  log sum_r s_r^2 exp(log_sum_sq_probs_r)
    mean_logit        the sum of the ranks' parts

The log-probabilities of targets follow from the same results.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import Statistics, TokenStatistics, beside_topk, changed, repeats

# N tokens, K classes of a target (..., K), R ranks that share the vocabulary


class Rows(NamedTuple):
    """The numbers of rows of logits, (N,) each; None or (0,) if not requested."""

    target_logit: Tensor  # (N, K) with a target (N, K)
    lse_pair: Tensor  # (N, 2)
    logit_sum: Tensor | None  # sum_j w_j (z_j - lse), where lse counts as a constant
    expected_log_prob: Tensor | None = None
    argmax: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None

    @classmethod
    def of_forward(cls, results: Sequence[Tensor]) -> "Rows":
        """From the results of a forward operator of a head."""
        return cls(*results[:4], *results[5:-1])

    @property
    def lse(self) -> Tensor:  # (N,)
        return lse_of_pair(self.lse_pair)

    def statistics(self, asked: Statistics) -> TokenStatistics:
        """The requested statistics, detached."""
        entropy = 0.0 - self.expected_log_prob if asked.entropy else None  # a difference, so that no entropy is -0
        found = (self.argmax, self.lse if asked.lse else None, entropy, self.log_sum_sq_probs, self.mean_logit)
        return changed(TokenStatistics.found(asked, found), torch.Tensor.detach)


def asked_of_rows(problem: Any) -> dict[str, bool]:
    """The forward operator's flags for the statistics and the losses of TokenLosses. It always returns lse."""
    asked = problem.statistics
    return {
        "logit_sum": problem.loss.label_smoothing != 0.0,
        "expected_log_prob": asked.entropy,
        "argmax": asked.argmax,
        "log_sum_sq_probs": asked.log_sum_sq_probs,
        "mean_logit": asked.mean_logit,
    }


def statistics_of_shards(
    asked: Statistics,
    per_shard: TokenStatistics,  # (R, N) each: entropy, log_sum_sq_probs and mean_logit, as far as they are requested
    lse: Tensor | None,  # (N,), of the whole rows; None if it is not asked for
    log_share: Tensor,  # (R, N): lse_r - lse
) -> TokenStatistics:  # (N,)
    """Only the entropy has a derivative."""
    _, _, entropy, squares, mean_logit = per_shard
    # a rank without classes, or with a bias of -inf on all of them, has a share of 0, where s log s is 0
    log_share = log_share.clamp(min=-1e4)
    share = log_share.exp()
    if asked.entropy:
        entropy = torch.where(share == 0.0, 0.0, share * (entropy - log_share)).sum(0)
    if asked.log_sum_sq_probs:
        squares = torch.where(share == 0.0, -torch.inf, (2.0 * log_share + squares).detach()).logsumexp(0)
    mean_logit = mean_logit.detach().sum(0) if asked.mean_logit else None
    return TokenStatistics(None, lse if asked.lse else None, entropy, squares, mean_logit)


def lse_of_pair(pair: Tensor) -> Tensor:  # (..., 2) -> (...)
    return pair[..., 0].detach() + pair[..., 1]


def surprisal(target_logit: Tensor, pair: Tensor) -> Tensor:  # (N,) or (N, K), (N, 2) -> as target_logit
    """lse - target_logit, which is -log p of the target. It cannot be negative: a negative number is a rounding error
    of target_logit and becomes 0.
    """
    reference, log_sum = (beside_topk(number, target_logit) for number in pair.unbind(-1))
    distance = (reference.detach() - target_logit) + log_sum
    return distance - distance.detach().clamp(max=0.0)


def log_probs_of_targets(
    counts: Tensor,  # (...) or (..., K) bool: False if ignored
    target_logit: Tensor,  # (...) or (..., K)
    pair: Tensor,  # (..., 2)
) -> Tensor:  # as target_logit
    return torch.where(counts, -surprisal(target_logit, pair), 0.0)


def log_probs_of_rows(
    target: Tensor,  # (...) or (..., K)
    ignore_index: int,
    rows: Rows,
    asked: Statistics,
    *,
    tail: bool,
) -> tuple[Tensor, ...]:
    """Returns log_probs, lse, entropy, argmax, log_sum_sq_probs, mean_logit and the tail's log p. Missing results have
    shape (0,).
    """
    counts, lse = target != ignore_index, rows.lse
    of_one_class = target.dim() == lse.dim()
    valid = counts if of_one_class else counts.any(-1)
    log_probs = log_probs_of_targets(counts, rows.target_logit, rows.lse_pair)
    of_tail = nothing = lse.new_zeros(0)
    if tail:
        by_target = (log_probs, target, counts)
        of_tail = tail_log_prob(*(s.unsqueeze(-1) if of_one_class else s for s in by_target))
    return (
        log_probs,
        torch.where(valid, lse, 0.0),
        torch.where(valid, 0.0 - rows.expected_log_prob, 0.0) if asked.entropy else nothing,
        rows.argmax if asked.argmax else nothing.to(torch.int64),
        torch.where(valid, rows.log_sum_sq_probs, 0.0) if asked.log_sum_sq_probs else nothing,
        torch.where(valid, rows.mean_logit, 0.0) if asked.mean_logit else nothing,
        of_tail,
    )


def logsumexp(numbers: Tensor) -> Tensor:  # (..., K), K at least 1 -> (...)
    """logsumexp over the last dimension, with gradient 0 where all numbers are -inf. torch.logsumexp asks whether there
    are any numbers, which a graph cannot know of a number of tokens that depends on data.
    """
    largest = numbers.detach().amax(-1)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    total = (numbers - largest.unsqueeze(-1)).exp().sum(-1)
    nothing = total == 0.0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, total).log() + largest)


def tail_log_prob(log_probs: Tensor, target: Tensor, counts: Tensor) -> Tensor:  # (..., K) each -> (...)
    """log(1 - sum_k p_k), where the sum counts each class that a token's targets name once. 0 if they name none.

    With s the log of that sum, log(1 - e^s) is log1p(-e^s) if the tail is the larger part and log(-expm1(s)) if it is
    the smaller. A tail probability below the dtype's eps is only a rounding error of the sum. In that case the result
    is log(eps), with gradient 0. A class that is switched off adds nothing: logsumexp of nothing else would have a
    derivative of nan.
    """
    named = counts & ~repeats(target) & (log_probs != -torch.inf)
    total = logsumexp(torch.where(named, log_probs, -torch.inf))
    total = torch.where(counts.any(-1), total.clamp(max=-torch.finfo(total.dtype).eps), -torch.inf)
    small = total < -math.log(2.0)
    # the other branch's tokens get a harmless number, so that their derivative in this branch is finite
    of_small = torch.log1p(-torch.where(small, total, -1.0).exp())
    of_large = torch.log(-torch.expm1(torch.where(small, -1.0, total)))
    return torch.where(small, of_small, of_large)
