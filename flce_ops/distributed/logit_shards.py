"""Losses of given logits when each rank holds some classes: as vocab_parallel.py, without a head.

    rank r:  lse_r, target_logit_r or 0, logit_sum_r, max_r and argmax_r of its columns   one all_gather of (2 to 5, N)
    lse = logsumexp_r lse_r,   target_logit and logit_sum: sums over r                    on every rank

The operators of given logits know one row as a whole, so a target of another rank is given to them as a class that they
have, and its logit left out. Backward reads each rank's own logits a second time and sends nothing.
"""

import torch
from torch import Tensor

from flce_ops.aten.logits import activate_with_slope
from flce_ops.distributed.layout import Layout
from flce_ops.distributed.vocab_parallel import gather_shards
from flce_ops.math.options import TokenLosses
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.shards import argmax_of_shards, lse_of_shards
from flce_ops.objectives.cross_entropy import losses_of_rows

# N tokens of this rank, V vocabulary, v of them on this rank, R ranks that share the vocabulary

IGNORED = -1  # in place of ignore_index, which may be the number of one of these columns


def logit_shard_losses(layout: Layout, problem: TokenLosses, num_classes: int) -> tuple[Tensor, Tensor | None]:
    """(N,), the same on every rank of the vocabulary, 0 where ignored; argmax (N,).

    `problem` has this rank's (N, v) logits; targets and class weights count the whole vocabulary.
    """
    operands, smoothed = problem.operands, problem.loss.label_smoothing != 0.0
    gathered = gather_shards(layout, torch.stack(numbers_of_shard(layout, problem, num_classes)))
    lse, target_logit = lse_of_shards(gathered[:, 0]), gathered[:, 1].sum(0)
    logit_sum = gathered[:, 2].sum(0) if smoothed else None
    losses, valid = losses_of_rows(
        operands, problem.ignore_index, problem.loss, num_classes, target_logit, lse, logit_sum
    )
    if not problem.statistics.argmax:
        return losses, None
    largest = argmax_of_shards(gathered[:, -1].detach(), gathered[:, -2].detach())
    return losses, torch.where(valid, largest, -1)


def numbers_of_shard(layout: Layout, problem: TokenLosses, num_classes: int) -> list[Tensor]:  # (N,) each
    logits, target, weight = problem.operands
    start, size = layout.vocabulary_range(num_classes)
    column = target.long() - start
    here = (column >= 0) & (column < size)
    somewhere = (target >= 0) & (target < num_classes)
    column = torch.where(here, column, torch.where(somewhere, 0, max(size, 1)))  # out of range it stays, to be refused
    column = torch.where(problem.valid, column, IGNORED)
    target_logit, lse, logit_sum, argmax, _ = torch.ops.flce.cross_entropy_forward(
        logits if size else logits.new_zeros(logits.shape[0], 1),
        column,
        weight[start : start + size] if size and weight is not None else None,
        ignore_index=IGNORED,
        logit_sum=problem.loss.label_smoothing != 0.0,
        **problem.logits._asdict(),
        argmax=problem.statistics.argmax,
    )
    if not size:  # no class is left for this rank
        nothing = logits.sum(1).to(accumulation_dtype(logits.dtype))
        target_logit, lse, logit_sum = nothing, nothing - torch.inf, nothing
    numbers = [lse, torch.where(here & problem.valid, target_logit, 0.0)]
    numbers += [logit_sum] if problem.loss.label_smoothing != 0.0 else []
    if problem.statistics.argmax:
        largest = lse.detach()  # -inf without classes
        if size:
            largest = logits.detach().gather(1, argmax.clamp(min=0)[:, None]).to(lse.dtype)
            largest = activate_with_slope(largest, problem.logits)[0].squeeze(1)
        numbers += [(argmax + start).to(lse.dtype), largest]  # float32 counts to 2^24
    return numbers
