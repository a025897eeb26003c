"""What the ranks that share the vocabulary tell each other about a chunk: O(rows) numbers, never a logit.

    log of the softmax's denominator    all_gather of two numbers a row and model: maximum and log-sum relative to it
    row sums of the divergence          all_reduce of one number a row, two for "jsd"

On one rank both are the identity.
"""

import torch
from torch import Tensor

from flce_ops.support.exchange import all_gather

# n rows of a chunk, v columns of this rank, R ranks, k softmaxes or sums


def shift_rows(logits: Tensor) -> tuple[Tensor, Tensor]:  # (n, v) -> (n,), (n,)
    """Subtracts each row's maximum in place; returns it and log sum exp of what is left.

    A shard may have no column, or only columns that a bias of -inf took out: its maximum is a finite number then.
    """
    lowest = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        row_max = logits.new_full((logits.shape[0],), lowest)
    else:
        row_max = logits.amax(1).clamp_min_(lowest)
    return row_max, logits.sub_(row_max[:, None]).exp().sum(1).log_()


def log_denominator(row_max: Tensor, log_sum: Tensor, group: str | None, ranks: int) -> Tensor:  # (k, n) each
    """log of the softmax's denominator over all columns, relative to this rank's row_max.

    Not one lse a row: in float32 that costs the digits of a small log-sum beside a large maximum, and a reverse
    divergence of logits of tens had 3 to 5 times the error.
    """
    if ranks == 1:
        return log_sum
    row_maxes, log_sums = all_gather(torch.stack([row_max, log_sum]), group, ranks).unbind(1)
    largest = row_maxes.amax(0)
    return (largest - row_max) + (row_maxes - largest + log_sums).logsumexp(0)
