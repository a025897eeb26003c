"""Statistics of rows of logits: what the forward operator must return for them, and how they follow from its results.

With z the row of logits (scaled, capped and divided by the temperature), p = softmax(z) and V classes:

    lse               log sum_j exp z_j
    entropy           -sum_j p_j log p_j  =  lse - sum_j p_j z_j
    log_sum_sq_probs  log sum_j p_j^2     =  logsumexp_j 2 z_j - 2 lse
    mean_logit        sum_j z_j / V

If ranks share the vocabulary, with s_r = exp(lse_r - lse) the part of the softmax's denominator on rank r:

    entropy           sum_r s_r (entropy_r - log s_r)
    log_sum_sq_probs  log sum_r s_r^2 exp(log_sum_sq_probs_r)
    mean_logit        the sum of the ranks' parts

The log-probabilities of targets follow from the same results.
For rows whose classes are spread over ranks, the second half of the file exchanges the numbers of the shards and
combines them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..support.sizes import cdiv
from ..support.torch_private import collectives
from .options import Statistics, TokenStatistics, beside_topk, changed, in_columns, repeats, tokens_that_count

# N tokens, K classes of a target (..., K), R ranks that share the vocabulary


class Rows(NamedTuple):
    """The numbers of rows of logits, (N,) each; None or (0,) if not requested."""

    target_logit: Tensor  # (N, K) with a target (N, K)
    lse_pair: Tensor  # (N, 2)
    logit_sum: Tensor | None  # sum_j w_j (z_j - lse), where lse counts as a constant
    expected_log_prob: Tensor | None = None
    argmax: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logit: Tensor | None = None

    @classmethod
    def of_forward(cls, results: Sequence[Tensor]) -> "Rows":
        """From the results of a forward operator of a head."""
        return cls(*results[:4], *results[5:-1])

    @property
    def lse(self) -> Tensor:  # (N,)
        return lse_of_pair(self.lse_pair)

    def statistics(self, asked: Statistics) -> TokenStatistics:
        """The requested statistics, detached."""
        entropy = 0.0 - self.expected_log_prob if asked.entropy else None  # a difference, so that no entropy is -0
        found = (self.argmax, self.lse if asked.lse else None, entropy, self.log_sum_sq_probs, self.mean_logit)
        return changed(TokenStatistics.found(asked, found), torch.Tensor.detach)


def asked_of_rows(problem: Any) -> dict[str, bool]:
    """The forward operator's flags for the statistics and the losses of TokenLosses. It always returns lse."""
    asked = problem.statistics
    return {
        "logit_sum": problem.loss.label_smoothing != 0.0,
        "expected_log_prob": asked.entropy,
        "argmax": asked.argmax,
        "log_sum_sq_probs": asked.log_sum_sq_probs,
        "mean_logit": asked.mean_logit,
    }


def statistics_of_shards(
    asked: Statistics,
    per_shard: TokenStatistics,  # (R, N) each: entropy, log_sum_sq_probs and mean_logit, as far as they are requested
    lse: Tensor | None,  # (N,), of the whole rows; None if it is not asked for
    log_share: Tensor,  # (R, N): lse_r - lse
) -> TokenStatistics:  # (N,)
    """Only the entropy has a derivative."""
    _, _, entropy, squares, mean_logit = per_shard
    # a rank without classes, or with a bias of -inf on all of them, has a share of 0, where s log s is 0
    log_share = log_share.clamp(min=-1e4)
    share = log_share.exp()
    if asked.entropy:
        entropy = torch.where(share == 0.0, 0.0, share * (entropy - log_share)).sum(0)
    if asked.log_sum_sq_probs:
        squares = torch.where(share == 0.0, -torch.inf, (2.0 * log_share + squares).detach()).logsumexp(0)
    mean_logit = mean_logit.detach().sum(0) if asked.mean_logit else None
    return TokenStatistics(None, lse if asked.lse else None, entropy, squares, mean_logit)


def lse_of_pair(pair: Tensor) -> Tensor:  # (..., 2) -> (...)
    return pair[..., 0].detach() + pair[..., 1]


def surprisal(target_logit: Tensor, pair: Tensor) -> Tensor:  # (N,) or (N, K), (N, 2) -> as target_logit
    """lse - target_logit, which is -log p of the target. It cannot be negative: a negative number is a rounding error
    of target_logit and becomes 0.
    """
    reference, log_sum = (beside_topk(number, target_logit) for number in (pair[..., 0].detach(), pair[..., 1]))
    distance = (reference - target_logit) + log_sum
    return distance - distance.detach().clamp(max=0.0)


def log_probs_of_targets(
    counts: Tensor,  # (...) or (..., K) bool: False if ignored
    target_logit: Tensor,  # (...) or (..., K)
    pair: Tensor,  # (..., 2)
) -> Tensor:  # as target_logit
    return torch.where(counts, -surprisal(target_logit, pair), 0.0)


def log_probs_of_rows(
    target: Tensor,  # (...) or (..., K)
    ignore_index: int,
    rows: Rows,
    asked: Statistics,
    *,
    tail: bool,
) -> tuple[Tensor, ...]:
    """Returns log_probs, lse, entropy, argmax, log_sum_sq_probs, mean_logit and the tail's log p. Missing results have
    shape (0,).
    """
    counts, lse = target != ignore_index, rows.lse
    of_one_class = target.dim() == lse.dim()
    valid = counts if of_one_class else counts.any(-1)
    log_probs = log_probs_of_targets(counts, rows.target_logit, rows.lse_pair)
    of_tail = nothing = lse.new_zeros(0)
    if tail:
        by_target = (log_probs, target, counts)
        of_tail = tail_log_prob(*(s.unsqueeze(-1) if of_one_class else s for s in by_target))
    return (
        log_probs,
        torch.where(valid, lse, 0.0),
        torch.where(valid, 0.0 - rows.expected_log_prob, 0.0) if asked.entropy else nothing,
        rows.argmax if asked.argmax else nothing.to(torch.int64),
        torch.where(valid, rows.log_sum_sq_probs, 0.0) if asked.log_sum_sq_probs else nothing,
        torch.where(valid, rows.mean_logit, 0.0) if asked.mean_logit else nothing,
        of_tail,
    )


def logsumexp(numbers: Tensor) -> Tensor:  # (..., K), K at least 1 -> (...)
    """logsumexp over the last dimension, with gradient 0 where all numbers are -inf. torch.logsumexp asks whether there
    are any numbers, which a graph cannot know of a number of tokens that depends on data.
    """
    largest = numbers.detach().amax(-1)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    total = (numbers - largest.unsqueeze(-1)).exp().sum(-1)
    nothing = total == 0.0
    return torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, total).log() + largest)


def tail_log_prob(log_probs: Tensor, target: Tensor, counts: Tensor) -> Tensor:  # (..., K) each -> (...)
    """log(1 - sum_k p_k), where the sum counts each class that a token's targets name once. 0 if they name none.

    With s the log of that sum, log(1 - e^s) is log1p(-e^s) if the tail is the larger part and log(-expm1(s)) if it is
    the smaller. A tail probability below the dtype's eps is only a rounding error of the sum. In that case the result
    is log(eps), with gradient 0. A class that is switched off adds nothing: logsumexp of nothing else would have a
    derivative of nan.
    """
    named = counts & ~repeats(target) & (log_probs != -torch.inf)
    total = logsumexp(torch.where(named, log_probs, -torch.inf))
    total = torch.where(counts.any(-1), total.clamp(max=-torch.finfo(total.dtype).eps), -torch.inf)
    small = total < -math.log(2.0)
    # the other branch's tokens get a harmless number, so that their derivative in this branch is finite
    of_small = torch.log1p(-torch.where(small, total, -1.0).exp())
    of_large = torch.log(-torch.expm1(torch.where(small, -1.0, total)))
    return torch.where(small, of_small, of_large)


# N tokens, n rows of a chunk, V vocabulary, R ranks that share it


def lse_of_shards(
    lse: Tensor,  # (R, ...)
    exp: Callable[[Tensor], Tensor] = torch.exp,
    log: Callable[[Tensor], Tensor] = torch.log,
) -> Tensor:  # (...)
    """A logsumexp whose derivatives, the ranks' shares, add up to 1. torch.logsumexp computes the derivatives as
    exp(lse_r - lse) with a rounded lse, so that they add up to 1 only within that rounding.
    """
    largest = lse.detach().amax(0)
    largest = torch.where(largest.isinf(), 0.0, largest)
    return largest + log(exp(lse - largest).sum(0))


def log_shares(references: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor]:  # (R, N) each, of each rank's lse_pair
    """Returns the lse_pair of whole rows, (N, 2), and lse_r - lse, (R, N): the log of each rank's part of the softmax's
    denominator.
    """
    references = references.detach()
    largest = references.amax(0)
    largest = torch.where(largest.isinf(), 0.0, largest)
    distance = (references - largest) + log_sums
    log_sum = distance.exp().sum(0).log()
    return torch.stack([largest, log_sum], -1), distance - log_sum


def log_denominator(
    row_max: Tensor,  # (k, n), as is the next
    log_sum: Tensor,
    group: str | None,
    ranks: int,
    exp: Callable[[Tensor], Tensor] = torch.exp,  # in the base of the logarithms
    log: Callable[[Tensor], Tensor] = torch.log,
) -> Tensor:  # (k, n)
    """The log of the denominator of k softmaxes over all columns, relative to this rank's row_max.

    The maximum and the log-sum stay two numbers. Their sum lse, in float32, would lose digits of a small log-sum beside
    a large maximum: reverse divergences of logits of size 10 and more had 3 to 5 times the error.
    """
    row_maxes, log_sums = all_gather(torch.stack([row_max, log_sum]), group, ranks).unbind(1)
    return lse_of_shards(row_maxes - row_max + log_sums, exp, log)


def argmax_of_shards(max_logit: Tensor, column: Tensor) -> Tensor:  # (R, N), (R, N) -> (N,)
    """The class of the largest logit, the first of equals. Columns count the classes of the whole vocabulary."""
    return column.where(max_logit == max_logit.amax(0), torch.inf).amin(0).nan_to_num(posinf=0.0).long()


def shard_rows(num_classes: int, ranks: int) -> int:
    """The rows of the largest shard."""
    return cdiv(num_classes, ranks)


def shards_of_classes(classes: slice, ranks: int) -> list[slice]:
    """The classes of each of `ranks` shards. Each has ceil(V / R) classes; the last ones have fewer or none."""
    rows = shard_rows(classes.stop - classes.start, ranks)
    ends = [min(classes.start + rank * rows, classes.stop) for rank in range(ranks + 1)]
    return [slice(start, stop) for start, stop in zip(ends, ends[1:])]


def class_weights_of_shards(
    weight: Tensor | None,  # (V,)
    shards: Sequence[slice],  # the classes of each
    like: Tensor,
) -> Tensor:  # (R,)
    """The sum of the class weights of each shard."""
    if weight is None:
        return torch.stack([like.new_full((), classes.stop - classes.start) for classes in shards])
    return torch.stack([weight[classes].to(like.dtype).sum() for classes in shards])


def logit_sum_of_shards(
    logit_sums: Tensor,  # (R, N), as is the next
    log_share: Tensor,
    class_weights: Tensor,  # (R,)
) -> Tensor:  # (N,)
    """sum_j w_j (z_j - lse) from each shard's sum_j w_j (z_j - lse_r). The two lse count as constants.

    log_share is cut off at the lowest finite number, for shards whose classes are none or are switched off.
    """
    log_share = log_share.detach().clamp(min=torch.finfo(log_share.dtype).min)
    return (logit_sums + class_weights[:, None] * log_share).sum(0)


class Exchange:
    """Sends numbers of a chunk's shards to the ranks that share its rows."""

    def __init__(self, group: str | None, ranks: int) -> None:
        self.group, self.ranks = group, ranks

    def gather(self, numbers: Tensor) -> Tensor:  # (k, n) -> (R, k, n)
        return all_gather(numbers, self.group, self.ranks)

    def finish_statistics(
        self, asked: Statistics, own: TokenStatistics, valid: Tensor, results: Sequence[Tensor]
    ) -> None:
        """Combines `own`, made by statistics_of_shard, and fills in `results`, the statistics after the argmax. This
        takes one more exchange between the ranks.
        """
        if own.lse is None:
            return
        others = own._replace(lse=None)
        sent = [*own.lse.unbind(-1), *(numbers for numbers in others if numbers is not None)]
        references, log_sums, *gathered = self.gather(torch.stack(sent)).unbind(1)
        pair, log_share = log_shares(references, log_sums)
        per_shard = changed(others, lambda _: gathered.pop(0))
        whole = statistics_of_shards(asked, per_shard, lse_of_pair(pair), log_share)
        for result, found in zip(results, whole[1:], strict=True):
            if found is not None:
                result.copy_(torch.where(valid, found, 0.0))


def statistics_of_shard(asked: Statistics, like: Tensor) -> TokenStatistics:  # (N,) each, to be filled in
    """Memory for the statistics that a rank sends the others. They include the rank's lse, because every statistic is
    weighted by the rank's share of the probability: its lse_pair, (N, 2). The argmax is not included; it is exchanged
    with each chunk.
    """
    if not any(asked[1:]):
        return TokenStatistics()
    needed = asked._replace(argmax=False, lse=True)
    found = TokenStatistics(*(torch.empty_like(like) if wanted else None for wanted in needed))
    return found._replace(lse=like.new_empty(like.shape[0], 2))


def target_columns(
    target: Tensor, ignore_index: int, vocab_start: int, num_classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns valid (N,): not ignored; hit: not ignored, and this rank has the class; column: the class's index here,
    or 0.

    `hit` has the shape of `target`, (N,) or (N, K); `column` is (N, 1) or (N, K).
    """
    column = target.long() - vocab_start
    hit = (target != ignore_index) & (column >= 0) & (column < num_classes)
    return tokens_that_count(target, ignore_index), hit, in_columns(torch.where(hit, column, 0))


def all_gather(numbers: Tensor, group: str | None, ranks: int) -> Tensor:  # (...) -> (R, ...)
    if ranks == 1:
        return numbers[None]
    gathered = collectives.all_gather_into_tensor(numbers, ranks, group)
    return collectives.wait_tensor(gathered).view(ranks, *numbers.shape)


def all_reduce(numbers: Tensor, group: str | None, ranks: int) -> Tensor:
    if ranks == 1:
        return numbers
    return collectives.wait_tensor(collectives.all_reduce(numbers, "sum", group))
