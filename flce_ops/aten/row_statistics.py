"""Turns rows of logits into exponentials for a one-pass kernel, and computes the requested statistics from them."""

import torch
from torch import Tensor

from ..math.options import Statistics, TokenStatistics
from .class_blocks import ALL_AT_ONCE, OverClasses
from .logits import exponentiate, log_sum_of_squares, row_moments, subtract_maximum, weighted_logits

# N tokens, n rows of a chunk or of a block of one, V vocabulary, v of them here


def extra_matrices(asked: Statistics) -> int:
    """How many more matrices of a block's size the statistics need: one, for z - row_max or E^2."""
    return int(asked.entropy or asked.log_sum_sq_probs)


def exponentiate_with_statistics(
    logits: Tensor,  # (n, v), overwritten with E
    out: TokenStatistics,  # (N,) each
    rows: slice,  # the rows of `out`
    num_classes: int,  # V
    class_weight: Tensor | None,  # (v,)
    *,
    logit_sum: bool,
    over: OverClasses = ALL_AT_ONCE,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns row_max, the row sums of E, and on request sum_j w_j (z_j - row_max), (n,) each."""
    if out.argmax is not None:
        out.argmax[rows] = logits.argmax(1)
    if out.mean_logit is not None:
        torch.div(over.sum(logits), num_classes, out=out.mean_logit[rows])
    row_max = subtract_maximum(logits, over)
    sum_from_maximum = weighted_logits(logits, class_weight, over) if logit_sum else None
    if out.entropy is not None:
        row_sum, first_moment = row_moments(logits, over)
        out.entropy[rows] = row_sum.log() - first_moment / row_sum
    else:
        row_sum = exponentiate(logits, over)
    if out.log_sum_sq_probs is not None:
        out.log_sum_sq_probs[rows] = log_sum_of_squares(logits, row_sum, over)
    if out.lse is not None:
        out.lse[rows] = row_max + row_sum.log()
    return row_max, row_sum, sum_from_maximum
