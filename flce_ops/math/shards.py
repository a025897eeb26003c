"""For rows whose classes are spread over ranks: exchanges the numbers of the shards and combines them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..support.integers import cdiv
from ..support.torch_private import collectives
from .options import Statistics, TokenStatistics, changed, in_columns, tokens_that_count
from .statistics import lse_of_pair, statistics_of_shards

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
        self,
        asked: Statistics,
        own: TokenStatistics,
        valid: Tensor,
        results: Sequence[Tensor],
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
