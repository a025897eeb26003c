"""The numbers of rows of logits: reductions over their classes, of which ranks may have shards."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..math.options import Statistics

# n rows of a chunk or of a block of one, V vocabulary, v classes of this rank, R ranks


def sum_from_lse(sum_from_maximum: Tensor, log_sum: Tensor, weight_sum: Tensor | int) -> Tensor:
    """sum_j w_j (z_ij - lse_i), from sum_j w_j (z_ij - row_max_i) and lse_i - row_max_i, (n,) each.

    If a bias of -inf switches off all classes of a shard, the sum is -inf, not nan.
    """
    return sum_from_maximum - weight_sum * torch.where(log_sum == -torch.inf, 0.0, log_sum)


def finite_maximum(logits: Tensor) -> Tensor:  # (n, 1)
    """The row maximum, or the lowest finite number if a shard has no class or a bias of -inf on all classes.
    Exponentials are then 0, not nan.
    """
    lowest = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0], 1), lowest)
    return logits.amax(1, keepdim=True).clamp_min_(lowest)


def shift_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Subtracts row_max in place. Returns row_max and the log sum exp of the rest, (n,) each."""
    row_max = finite_maximum(logits)
    return row_max.squeeze(1), logits.sub_(row_max).exp().sum(1).log_()


def at_least_finite(log_p: Tensor) -> Tensor:
    """Clamps in place. If a bias of -inf switches a class off, p log p becomes 0, not 0 * -inf; exp(-10^4) is 0 in
    every dtype.
    """
    return log_p.clamp_(min=-1e4)


def extra_matrices(asked: Statistics) -> int:
    """How many more matrices of a block's size the statistics need: one, for z - row_max or E^2."""
    return int(asked.entropy or asked.log_sum_sq_probs)


class BlockNumbers(NamedTuple):
    """(n,) each; None if not asked for."""

    row_max: Tensor
    row_sum: Tensor  # of E = exp(z - row_max)
    log_sum: Tensor  # its logarithm: lse - row_max
    logit_sum: Tensor | None  # sum_j w_j (z_j - lse)
    max_logit: Tensor | None
    argmax: Tensor | None
    expected_log_prob: Tensor | None  # sum_j p_j (z_j - lse)
    log_sum_sq_probs: Tensor | None
    mean_logit: Tensor | None


def reduce_rows(
    logits: Tensor,  # (n, v), overwritten with E
    asked: Statistics,
    num_classes: int,  # V
    weight: Tensor | None = None,  # (v,)
    weight_sum: Tensor | int | None = None,  # sum_j w_j; None if no logit sum is asked for
) -> BlockNumbers:
    max_logit, argmax = logits.max(1) if asked.argmax else (None, None)
    mean_logit = logits.sum(1) / num_classes if asked.mean_logit else None
    row_max = finite_maximum(logits)
    logits.sub_(row_max)
    logit_sum = shifted = expected = squares = None
    if weight_sum is not None:
        logit_sum = logits.sum(1) if weight is None else logits @ weight.to(logits.dtype)
    if asked.entropy:
        shifted = at_least_finite(logits).clone()
    row_sum = logits.exp_().sum(1)
    row_max, log_sum = row_max.squeeze(1), row_sum.log()
    if shifted is not None:
        expected = shifted.mul_(logits).sum(1) / row_sum - log_sum
    if logit_sum is not None:
        logit_sum = sum_from_lse(logit_sum, log_sum, weight_sum)
    if asked.log_sum_sq_probs:  # the largest E of a row is 1, so neither sum underflows or overflows
        squares = logits.square().sum(1).log_() - 2.0 * log_sum
    return BlockNumbers(row_max, row_sum, log_sum, logit_sum, max_logit, argmax, expected, squares, mean_logit)
