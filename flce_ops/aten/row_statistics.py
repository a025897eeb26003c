"""Turns a one-pass kernel's rows of logits into exponentials, and computes the requested statistics on the way."""

import torch
from torch import Tensor

from ..math.options import Statistics, TokenStatistics
from .class_blocks import ALL_AT_ONCE, OverClasses
from .logits import exponentiate_rows, log_sum_of_squares, row_moments

# N tokens, n rows of a chunk or of a block of one, V vocabulary, v of them here


def extra_matrices(asked: Statistics) -> int:
    """How many more matrices of a block's size exist: one for z - row_max or E^2."""
    return int(asked.entropy or asked.log_sum_sq_probs)


def exponentiate_with_statistics(
    logits: Tensor,  # (n, v), overwritten with E
    out: TokenStatistics,  # (N,) each
    rows: slice,  # the rows of `out`
    num_classes: int,  # V
    over: OverClasses = ALL_AT_ONCE,
) -> tuple[Tensor, Tensor]:  # row_max and the row sums of E, (n,) each
    if out.argmax is not None:
        out.argmax[rows] = logits.argmax(1)
    if out.mean_logit is not None:
        torch.div(over.sum(logits), num_classes, out=out.mean_logit[rows])
    if out.entropy is not None:
        row_max, row_sum, first_moment = row_moments(logits, over)
        out.entropy[rows] = row_sum.log() - first_moment / row_sum
    else:
        row_max, row_sum = exponentiate_rows(logits, over)
    if out.log_sum_sq_probs is not None:
        out.log_sum_sq_probs[rows] = log_sum_of_squares(logits, row_sum, over)
    if out.lse is not None:
        out.lse[rows] = row_max + row_sum.log()
    return row_max, row_sum
