"""Log-probabilities and entropy from the numbers of a row of logits."""

import torch
from torch import Tensor

from flce_ops.math.loss import surprisal


def log_probs_of_targets(
    valid: Tensor,  # (...)
    target_logit: Tensor,  # (...), as the others
    lse: Tensor,
    lse_rest: Tensor | None = None,  # what the rounding of lse took from it
) -> Tensor:  # (...)
    return torch.where(valid, -surprisal(target_logit, lse, lse_rest), 0.0)


def log_probs_of_rows(
    valid: Tensor,  # (...)
    target_logit: Tensor,  # (...), as the others
    lse: Tensor,
    expected_logit: Tensor | None,
    argmax: Tensor | None,
    log_sum_sq_probs: Tensor | None,
    mean_logit: Tensor | None,
    lse_rest: Tensor | None = None,  # what the rounding of lse took from it
) -> tuple[Tensor, ...]:
    """log_probs, lse, entropy, argmax and the next two from the row statistics; (0,) for those that are not there."""
    entropy = lse.new_zeros(0) if expected_logit is None else torch.where(valid, lse - expected_logit, 0.0)
    return (
        log_probs_of_targets(valid, target_logit, lse, lse_rest),
        torch.where(valid, lse, 0.0),
        entropy,
        lse.new_zeros(0, dtype=torch.int64) if argmax is None else argmax,
        *(lse.new_zeros(0) if n is None else torch.where(valid, n, 0.0) for n in (log_sum_sq_probs, mean_logit)),
    )
