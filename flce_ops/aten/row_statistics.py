"""Turns rows of logits into exponentials for a one-pass kernel, and computes the requested statistics from them."""

import torch
from torch import Tensor

from ..math.options import Statistics, TokenStatistics
from .logits import exponentiate_rows, log_sum_of_squares, row_moments

# N tokens, n rows of a chunk or of a block of one, V vocabulary, v of them here


def extra_matrices(asked: Statistics) -> int:
    """How many more matrices of a block's size the statistics need: one, for z - row_max or E^2."""
    return int(asked.entropy or asked.log_sum_sq_probs)


def exponentiate_with_statistics(
    logits: Tensor,  # (n, v), overwritten with E
    out: TokenStatistics,  # (N,) each
    rows: slice,  # the rows of `out`
    num_classes: int,  # V
) -> tuple[Tensor, Tensor]:  # row_max and the row sums of E, (n,) each
    if out.argmax is not None:
        out.argmax[rows] = logits.argmax(1)
    if out.mean_logit is not None:
        torch.sum(logits, 1, out=out.mean_logit[rows]).div_(num_classes)
    if out.entropy is not None:
        row_max, row_sum, first_moment = row_moments(logits)
        out.entropy[rows] = row_sum.log() - first_moment / row_sum
    else:
        row_max, row_sum = exponentiate_rows(logits)
    if out.log_sum_sq_probs is not None:
        out.log_sum_sq_probs[rows] = log_sum_of_squares(logits, row_sum)
    if out.lse is not None:
        out.lse[rows] = row_max + row_sum.log()
    return row_max, row_sum
