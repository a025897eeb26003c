"""Row statistics when each rank holds some classes: O(N) numbers cross the ranks, never a logit or a weight.

    rank r:   lse_r = logsumexp of its z_ij      target_logit_r = z_iy or 0      logit_sum_r = sum of its w_j z_ij
              hbar_r = sum of its p log p        max_r, argmax_r = its largest logit and that one's class

         (2 to 6, N) of every rank                one all_gather; a target of K slots has K numbers
    lse = logsumexp_r lse_r                             target_logit and logit_sum: sums over r       N numbers each,
    expected_log_prob = sum_r s_r (hbar_r + log s_r)    argmax: that of the largest max_r             on every rank
    with s_r = exp(lse_r - lse)

Backward: d lse / d lse_r = exp(lse_r - lse), so each rank takes its own row of the cotangents and nothing is sent; what
remains is the sum of grad_input over ranks, which belongs to the caller's placements.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flce_ops.distributed.layout import Layout
from flce_ops.distributed.local import localize
from flce_ops.math.options import LogitOptions, Operands, TokenLosses, TokenStatistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.shards import argmax_of_shards, lse_of_shards
from flce_ops.math.slots import in_columns, tokens_that_count
from flce_ops.math.statistics import asked_of_forward
from flce_ops.objectives.cross_entropy import losses_of_rows
from flce_ops.ops.autograd import finite_in_empty_rows

# N tokens of this rank, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


class RowStatistics(NamedTuple):
    """Of whole rows, (N,) each, on every rank of the vocabulary; None where not asked for."""

    target_logit: Tensor  # (N, K) of such a target
    lse: Tensor
    logit_sum: Tensor | None
    expected_log_prob: Tensor | None
    argmax: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logit: Tensor | None


class ShardRows(NamedTuple):
    """What a rank tells the others of its classes, (N,) each."""

    lse: Tensor
    target_logit: Tensor  # (N, K) of such a target; 0 where another rank has it
    others: dict[str, Tensor]  # what is asked for, by name


def vocab_parallel_losses(layout: Layout, problem: TokenLosses, num_classes: int) -> tuple[Tensor, TokenStatistics]:
    """(N,), the same on every rank of the vocabulary, 0 where ignored.

    `problem` has this rank's (v, D) weight and (v,) bias; targets and class weights count the whole vocabulary.
    """
    operands, asked = problem.operands, problem.statistics
    rows = vocab_parallel_rows(
        layout,
        operands,
        num_classes=num_classes,
        ignore_index=problem.ignore_index,
        logits=problem.logits,
        logit_sum=problem.loss.label_smoothing != 0.0,
        **asked_of_forward(asked),
    )
    losses, valid = losses_of_rows(
        operands,
        problem.ignore_index,
        problem.loss,
        num_classes,
        *rows[:3],
        target_weight=problem.target_weight,
    )
    entropy = -rows.expected_log_prob if asked.entropy else None
    found = TokenStatistics(None, rows.lse if asked.lse else None, entropy, rows.log_sum_sq_probs, rows.mean_logit)
    found = found.changed(lambda of_rows: torch.where(valid, of_rows.detach(), 0.0))
    return losses, found._replace(argmax=rows.argmax)


def vocab_parallel_rows(
    layout: Layout,
    operands: Operands,  # as above
    *,
    num_classes: int,  # V
    ignore_index: int,
    logits: LogitOptions,
    logit_sum: bool = False,
    expected_log_prob: bool = False,
    argmax: bool = False,
    log_sum_sq_probs: bool = False,
    mean_logit: bool = False,
) -> RowStatistics:
    asked = {
        "logit_sum": logit_sum,
        "expected_log_prob": expected_log_prob,
        "log_sum_sq_probs": log_sum_sq_probs,
        "mean_logit": mean_logit,
        "argmax": argmax,
    }
    target = operands.target
    start, size = layout.vocabulary_range(num_classes)
    if size:
        shard = rows_of_shard(operands, slice(start, start + size), num_classes, ignore_index, logits, asked)
    else:
        shard = rows_without_classes(operands, num_classes, ignore_index, asked)
    target_logits = in_columns(shard.target_logit).unbind(1)
    gathered = gather_shards(layout, torch.stack([shard.lse, *target_logits, *shard.others.values()]))
    lses, slots = gathered[:, 0], len(target_logits)  # (R, N), as each of the next
    others = dict(zip(shard.others, gathered[:, 1 + slots :].unbind(1), strict=True))
    lse = lse_of_shards(lses)
    target_logit = gathered[:, 1 : 1 + slots].sum(0).T.reshape(target.shape)
    sums = expected = largest = squares = mean = None
    if logit_sum:
        sums = others["logit_sum"].sum(0)
    if expected_log_prob:
        log_share = lses.log_softmax(0).clamp(min=-1e4)  # of a rank that is switched off s log s is 0
        expected = (log_share.exp() * (others["expected_log_prob"] + log_share)).sum(0)
    if log_sum_sq_probs:
        squares = (2.0 * lses.detach().log_softmax(0) + others["log_sum_sq_probs"].detach()).logsumexp(0)
    if mean_logit:
        mean = others["mean_logit"].detach().sum(0)
    if argmax:
        largest = argmax_of_shards(others["max_logit"].detach(), others["argmax"].detach())
        largest = torch.where(tokens_that_count(target, ignore_index), largest, -1)
    return RowStatistics(target_logit, lse, sums, expected, largest, squares, mean)


def rows_of_shard(
    operands: Operands,
    classes: slice,  # this rank's
    num_classes: int,
    ignore_index: int,
    logits: LogitOptions,
    asked: dict[str, bool],
) -> ShardRows:
    input, linear_weight, target, linear_bias, weight = operands
    results = torch.ops.flce.linear_cross_entropy_forward(
        input,
        linear_weight,
        target,
        linear_bias,
        None if weight is None else weight[classes],
        ignore_index=ignore_index,
        **logits._asdict(),
        vocab_start=classes.start,
        vocab_size=num_classes,
        **asked,
    )
    target_logit, lse, logit_sum, expected, max_logit, argmax, squares, mean_logit, *_ = results
    others = {}
    if asked["logit_sum"]:
        others["logit_sum"] = logit_sum
    if asked["expected_log_prob"]:
        others["expected_log_prob"] = finite_in_empty_rows(expected, lse)
    if asked["log_sum_sq_probs"]:
        others["log_sum_sq_probs"] = finite_in_empty_rows(squares, lse)
    if asked["mean_logit"]:
        others["mean_logit"] = mean_logit
    if asked["argmax"]:
        others["argmax"] = (argmax + classes.start).to(lse.dtype)  # float32 counts to 2^24
        others["max_logit"] = max_logit
    return ShardRows(lse, target_logit, others)


def rows_without_classes(operands: Operands, num_classes: int, ignore_index: int, asked: dict[str, bool]) -> ShardRows:
    """What a rank contributes that got no class (V < R, or ceil-sized chunks used up): lse and maximum -inf, sums 0.

    Made from empty slices, so that every argument gets its zero gradient and joins the collectives of backward.
    """
    input, linear_weight, target, linear_bias, _ = operands
    accumulate = accumulation_dtype(input.dtype)
    zero = input[:, :0].sum(1).to(accumulate) + linear_weight.sum().to(accumulate)
    if linear_bias is not None:
        zero = zero + linear_bias.sum().to(accumulate)
    zero = zero + refused_as_elsewhere(target, num_classes, ignore_index)
    lowest = zero - torch.inf
    names = [name for name, wanted in asked.items() if wanted]
    others = {**dict.fromkeys(names, zero), **({"max_logit": lowest} if asked["argmax"] else {})}
    return ShardRows(lowest, zero if target.dim() == 1 else zero[:, None].expand_as(target), others)


def gather_shards(layout: Layout, per_shard: Tensor) -> Tensor:  # (k, N) -> (R, k, N)
    """Rows of every shard of the vocabulary; backward hands each rank its own, without communication.

    Mesh dimensions that shard tokens are called Replicate here, so that nothing moves along them.
    """
    shards = DTensor.from_local(
        per_shard.unsqueeze(0), layout.mesh, layout.placements(vocabulary=Shard(0)), run_check=False
    )
    return localize(layout, shards, layout.replicated)


def refused_as_elsewhere(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:  # (N,) zeros
    """The other ranks' kernels refuse a target out of range; so does one over a class that nobody has."""
    nothing = torch.zeros(target.shape[0] + 1, 1, device=target.device)
    no_hit, *_ = torch.ops.flce.linear_cross_entropy_forward(
        nothing[1:], nothing[:1], target, ignore_index=ignore_index, vocab_start=num_classes, vocab_size=num_classes
    )
    return in_columns(no_hit)[:, 0]
