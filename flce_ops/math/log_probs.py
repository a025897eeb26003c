"""Log-probabilities and entropy from the numbers of a row of logits."""

import math

import torch
from torch import Tensor

from .topk import repeats

# K classes of a target (..., K)


def surprisal(target_logit: Tensor, lse: Tensor, lse_rest: Tensor | None) -> Tensor:  # (N,) or (N, K), as target_logit
    """lse - target_logit, which is -log p of the target. `lse_rest` is what the rounding of lse took from it.

    If lse_rest is given, lse covers all classes, the target among them, so the exact result cannot be negative. A
    negative number is then a rounding error of target_logit and becomes 0.
    """
    several = target_logit.dim() > lse.dim()
    distance = (lse.unsqueeze(-1) if several else lse) - target_logit
    if lse_rest is None:
        return distance
    distance = distance + (lse_rest.unsqueeze(-1) if several else lse_rest)
    return distance - distance.detach().clamp(max=0.0)


def log_probs_of_targets(
    counts: Tensor,  # (...) or (..., K) bool: False if ignored
    target_logit: Tensor,  # (...) or (..., K)
    lse: Tensor,  # (...)
    lse_rest: Tensor | None,  # what the rounding of lse took from it
) -> Tensor:  # as target_logit
    return torch.where(counts, -surprisal(target_logit, lse, lse_rest), 0.0)


def log_probs_of_rows(
    target: Tensor,  # (...) or (..., K)
    ignore_index: int,
    target_logit: Tensor,  # as target
    lse: Tensor,  # (...), as are the next four
    expected_log_prob: Tensor | None,
    argmax: Tensor | None,
    log_sum_sq_probs: Tensor | None,
    mean_logit: Tensor | None,
    lse_rest: Tensor | None = None,  # what the rounding of lse took from it
    *,
    tail: bool,
) -> tuple[Tensor, ...]:
    """Returns log_probs, lse, entropy, argmax, log_sum_sq_probs, mean_logit and the tail's log p, from the statistics
    of rows. Missing results have shape (0,).
    """
    counts = target != ignore_index
    of_one_class = target.dim() == lse.dim()
    valid = counts if of_one_class else counts.any(-1)
    nothing = lse.new_zeros(0)
    log_probs = log_probs_of_targets(counts, target_logit, lse, lse_rest)
    of_tail = nothing
    if tail:
        by_target = (log_probs, target, counts)
        of_tail = tail_log_prob(*(s.unsqueeze(-1) if of_one_class else s for s in by_target))
    return (
        log_probs,
        torch.where(valid, lse, 0.0),
        nothing if expected_log_prob is None else torch.where(valid, -expected_log_prob, 0.0),
        nothing.to(torch.int64) if argmax is None else argmax,
        *(nothing if n is None else torch.where(valid, n, 0.0) for n in (log_sum_sq_probs, mean_logit)),
        of_tail,
    )


def tail_log_prob(log_probs: Tensor, target: Tensor, counts: Tensor) -> Tensor:  # (..., K) each -> (...)
    """log(1 - sum_k p_k), where the sum counts each class that a token's targets name once. 0 if they name none.

    With s the log of that sum, log(1 - e^s) is log1p(-e^s) if the tail is the larger part and log(-expm1(s)) if it is
    the smaller. A tail probability below the dtype's eps is only a rounding error of the sum. In that case the result
    is log(eps), with gradient 0. A class that is switched off adds nothing: logsumexp of nothing else would have a
    derivative of nan.
    """
    named = counts & ~repeats(target) & (log_probs != -torch.inf)
    total = torch.where(named, log_probs, -torch.inf).logsumexp(-1)
    total = torch.where(counts.any(-1), total.clamp(max=-torch.finfo(total.dtype).eps), -torch.inf)
    small = total < -math.log(2.0)
    # the other branch's tokens get a harmless number, so that their derivative in this branch is finite
    of_small = torch.log1p(-torch.where(small, total, -1.0).exp())
    of_large = torch.log(-torch.expm1(torch.where(small, -1.0, total)))
    return torch.where(small, of_small, of_large)
