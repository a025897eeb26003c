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
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .options import Statistics, TokenStatistics, changed

# N tokens, R ranks that share the vocabulary


class Rows(NamedTuple):
    """The numbers of rows of logits, (N,) each; None or (0,) if not requested."""

    target_logit: Tensor  # (N, K) with a target (N, K)
    lse: Tensor
    logit_sum: Tensor | None  # sum_j w_j (z_j - lse), where lse counts as a constant
    lse_rest: Tensor | None = None  # what the rounding of lse took from it
    expected_log_prob: Tensor | None = None
    argmax: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None

    def statistics(self, asked: Statistics) -> TokenStatistics:
        """The requested statistics, detached."""
        if not any(asked):
            return TokenStatistics()
        entropy = -self.expected_log_prob if asked.entropy else None
        found = (self.argmax, self.lse, entropy, self.log_sum_sq_probs, self.mean_logit)
        return changed(TokenStatistics.found(asked, found), torch.Tensor.detach)


def asked_of_forward(asked: Statistics) -> dict[str, bool]:
    """The forward operator's flags for these statistics. It always returns lse."""
    return {
        "expected_log_prob": asked.entropy,
        "argmax": asked.argmax,
        "log_sum_sq_probs": asked.log_sum_sq_probs,
        "mean_logit": asked.mean_logit,
    }


def asked_of_rows(problem: Any) -> dict[str, bool]:
    """The same, and what the losses of a cross-entropy need. `problem` is TokenLosses, or a call."""
    return {"logit_sum": problem.loss.label_smoothing != 0.0, **asked_of_forward(problem.statistics)}


def statistics_of_forward(asked: Statistics, results: Sequence[Tensor]) -> TokenStatistics:
    """The statistics from the forward operator's results, detached."""
    _, lse, _, expected_log_prob, _, argmax, log_sum_sq_probs, mean_logit, *_ = results
    entropy = -expected_log_prob
    found = TokenStatistics.found(asked, (argmax, lse, entropy, log_sum_sq_probs, mean_logit))
    return changed(found, torch.Tensor.detach)


def statistics_of_shards(
    asked: Statistics,
    per_shard: TokenStatistics,  # (R, N) each: entropy, log_sum_sq_probs and mean_logit, as far as they are requested
    lse: Tensor,  # (N,), of the whole rows
    log_share: Tensor,  # (R, N): lse_r - lse
) -> TokenStatistics:  # (N,)
    _, _, entropy, squares, mean_logit = per_shard
    share = log_share.exp()
    if asked.entropy:  # a rank without classes, or with a bias of -inf on all of them, has a share of 0
        entropy = torch.where(share == 0.0, 0.0, share * (entropy - log_share)).sum(0)
    if asked.log_sum_sq_probs:
        squares = torch.where(share == 0.0, -torch.inf, 2.0 * log_share + squares).logsumexp(0)
    return TokenStatistics(
        lse=lse if asked.lse else None,
        entropy=entropy,
        log_sum_sq_probs=squares,
        mean_logit=mean_logit.sum(0) if asked.mean_logit else None,
    )
