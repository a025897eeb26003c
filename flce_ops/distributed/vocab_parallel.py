"""Row statistics when each rank holds some classes: O(N) numbers cross the ranks, never a logit or a weight.

    rank r:   lse_r = logsumexp of its z_ij      target_logit_r = z_iy or 0      logit_sum_r = sum of its w_j z_ij
              zbar_r = its expected logit        max_r, argmax_r = its largest logit and that one's class

         (2 to 6, N) of every rank                one all_gather; a target of K slots has K numbers
    lse = logsumexp_r lse_r                             target_logit and logit_sum: sums over r       N numbers each,
    expected_logit = sum_r exp(lse_r - lse) zbar_r      argmax: that of the largest max_r             on every rank

Backward: d lse / d lse_r = exp(lse_r - lse), so each rank takes its own row of the cotangents and nothing is sent; what
remains is the sum of grad_input over ranks, which belongs to the caller's placements.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flce_ops.distributed.layout import Layout
from flce_ops.distributed.local import localize
from flce_ops.math.loss import losses_of_rows
from flce_ops.math.options import LogitOptions, Operands, TokenLosses, TokenStatistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.shards import argmax_of_shards, lse_of_shards
from flce_ops.math.slots import in_columns, tokens_that_count
from flce_ops.math.statistics import asked_of_forward
from flce_ops.ops.autograd import finite_in_empty_rows

# N tokens of this rank, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


class RowStatistics(NamedTuple):
    """Of whole rows, (N,) each, on every rank of the vocabulary; None where not asked for."""

    target_logit: Tensor  # (N, K) of such a target
    lse: Tensor
    logit_sum: Tensor | None
    expected_logit: Tensor | None
    argmax: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logit: Tensor | None


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
    _, losses, valid = losses_of_rows(
        operands,
        problem.ignore_index,
        problem.loss,
        num_classes,
        *rows[:3],
        target_weight=problem.target_weight,
    )
    entropy = rows.lse - rows.expected_logit if asked.entropy else None
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
    expected_logit: bool = False,
    argmax: bool = False,
    log_sum_sq_probs: bool = False,
    mean_logit: bool = False,
) -> RowStatistics:
    input, linear_weight, target, linear_bias, weight = operands
    start, size = layout.vocabulary_range(num_classes)
    slots = in_columns(target).shape[1]
    asked = {
        "logit_sum": logit_sum,
        "expected_logit": expected_logit,
        "log_sum_sq_probs": log_sum_sq_probs,
        "mean_logit": mean_logit,
    }
    names = [name for name, wanted in asked.items() if wanted] + ["argmax", "max_logit"] * argmax
    if size == 0:
        no_hit = refused_as_elsewhere(target, num_classes, ignore_index)
        per_shard = without_classes(input, linear_weight, linear_bias, 1 + slots + len(names), argmax) + no_hit
    else:
        results = torch.ops.flce.linear_cross_entropy_forward(
            input,
            linear_weight,
            target,
            linear_bias,
            None if weight is None else weight[start : start + size],
            ignore_index=ignore_index,
            **logits._asdict(),
            vocab_start=start,
            vocab_size=num_classes,
            argmax=argmax,
            **asked,
        )
        target_logit, lse, sums, expected, max_logit, largest, squares, mean, *_ = results
        numbers = [lse, *in_columns(target_logit).unbind(1)]
        numbers += [sums] if logit_sum else []
        numbers += [finite_in_empty_rows(expected, lse)] if expected_logit else []
        numbers += [finite_in_empty_rows(squares, lse)] if log_sum_sq_probs else []
        numbers += [mean] if mean_logit else []
        numbers += [(largest + start).to(lse.dtype), max_logit] if argmax else []  # float32 counts to 2^24
        per_shard = torch.stack(numbers)
    gathered = gather_shards(layout, per_shard)
    lses = gathered[:, 0]  # (R, N), as each of the next
    by_name = dict(zip(names, gathered[:, 1 + slots :].unbind(1), strict=True))
    lse = lse_of_shards(lses)
    target_logit = gathered[:, 1 : 1 + slots].sum(0).T.reshape(target.shape)
    sums = expected = largest = squares = mean = None
    if logit_sum:
        sums = by_name["logit_sum"].sum(0)
    if expected_logit:
        expected = (lses.softmax(0) * by_name["expected_logit"]).sum(0)
    if log_sum_sq_probs:
        squares = (2.0 * lses.detach().log_softmax(0) + by_name["log_sum_sq_probs"].detach()).logsumexp(0)
    if mean_logit:
        mean = by_name["mean_logit"].detach().sum(0)
    if argmax:
        largest = argmax_of_shards(by_name["max_logit"].detach(), by_name["argmax"].detach())
        largest = torch.where(tokens_that_count(target, ignore_index), largest, -1)
    return RowStatistics(target_logit, lse, sums, expected, largest, squares, mean)


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


def without_classes(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, rows: int, argmax: bool
) -> Tensor:  # (k, N)
    """What a rank contributes that got no class (V < R, or ceil-sized chunks used up): lse and maximum -inf, sums 0.

    Made from empty slices, so that every argument gets its zero gradient and joins the collectives of backward.
    """
    accumulate = accumulation_dtype(input.dtype)
    zero = input[:, :0].sum(1).to(accumulate) + linear_weight.sum().to(accumulate)
    if linear_bias is not None:
        zero = zero + linear_bias.sum().to(accumulate)
    lowest = zero - torch.inf
    return torch.stack([lowest, *(zero,) * (rows - 1 - argmax), *(lowest,) * argmax])
