"""Rows whose classes are shared by ranks: combines the numbers of the shards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..support.exchange import all_gather
from ..support.holes import refuse_hole
from .options import Statistics, TokenStatistics, changed
from .statistics import statistics_of_shards
from .topk import in_columns, tokens_that_count

# N tokens, n rows of a chunk, V vocabulary, R ranks that share it


def lse_of_shards(
    lse: Tensor,  # (R, ...)
    exp: Callable[[Tensor], Tensor] = torch.exp,
    log: Callable[[Tensor], Tensor] = torch.log,
) -> Tensor:  # (...)
    """A logsumexp whose derivatives, the ranks' shares, add up to 1. torch's derivatives are exp(lse_r - lse) with a
    rounded lse.
    """
    largest = lse.detach().amax(0)
    largest = torch.where(largest.isinf(), 0.0, largest)
    return largest + log(exp(lse - largest).sum(0))


def log_denominator(row_max: Tensor, log_sum: Tensor, group: str | None, ranks: int) -> Tensor:  # (k, n) each
    """The log of the denominator of k softmaxes over all columns, relative to this rank's row_max.

    One lse a row would not do: in float32 it loses the digits of a small log-sum beside a large maximum. A reverse
    divergence of logits of size 10 and more had 3 to 5 times the error.
    """
    row_maxes, log_sums = all_gather(torch.stack([row_max, log_sum]), group, ranks).unbind(1)
    return lse_of_shards(row_maxes - row_max + log_sums)


def argmax_of_shards(max_logit: Tensor, column: Tensor) -> Tensor:  # (R, N), (R, N) -> (N,)
    """The class of the largest logit, the first of equals. Columns count the classes of the whole vocabulary."""
    return column.where(max_logit == max_logit.amax(0), torch.inf).amin(0).nan_to_num(posinf=0.0).long()


def shard_rows(num_classes: int, ranks: int) -> int:
    """The rows of the largest shard."""
    return -(-num_classes // ranks)


def check_shards(op: str, num_classes: int, ranks: int, tile: int) -> None:
    """Refuses shards of which not every one has whole tiles, but for the end of the vocabulary: on all ranks alike."""
    rows = shard_rows(num_classes, ranks)
    if ranks > 1 and (rows % tile or rows * (ranks - 1) >= num_classes):
        refuse_hole(op, "shards of parts of tiles", num_classes=num_classes, ranks=ranks, tile=tile, rows=rows)


class Exchange:
    """Combines the numbers of a chunk's shards into those of whole rows."""

    def __init__(self, group: str | None, ranks: int) -> None:
        self.group, self.ranks = group, ranks

    def whole_rows(
        self, per_shard: list[Tensor], largest: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns lse, the share, target_logit, logit_sum and argmax, (n,) each, from this rank's two or three numbers
        and its (max_logit, argmax).

        The share is this rank's part of the softmax's denominator. The shares of a row add up to 1, however lse is
        rounded.
        """
        smoothed = len(per_shard) == 3
        if self.ranks == 1:
            lse, target_logit = per_shard[:2]
            logit_sum = per_shard[2] if smoothed else None
            return lse, torch.ones_like(lse), target_logit, logit_sum, None if largest is None else largest[1]
        numbers = per_shard if largest is None else [*per_shard, *(part.to(per_shard[0].dtype) for part in largest)]
        gathered = self.gather(torch.stack(numbers))
        lse, sums = lse_of_shards(gathered[:, 0]), gathered[:, 1:3].sum(0)
        share = (per_shard[0] - lse).exp() / (gathered[:, 0] - lse).exp().sum(0)
        column = None if largest is None else argmax_of_shards(gathered[:, -2], gathered[:, -1])
        return lse, share, sums[0], sums[1] if smoothed else None, column

    def gather(self, numbers: Tensor) -> Tensor:  # (k, n) -> (R, k, n)
        return all_gather(numbers, self.group, self.ranks)

    def tiles(
        self, per_tile: Tensor, tiles: int
    ) -> Tensor:  # (t, ...), room for those of the largest shard -> (T, ...)
        """The numbers of all ranks' tiles of classes, in the order of the classes."""
        return self.gather(per_tile.contiguous()).flatten(0, 1)[:tiles]

    def finish_statistics(
        self, asked: Statistics, own: TokenStatistics, valid: Tensor, results: Sequence[Tensor]
    ) -> None:
        """Combines `own`, made by statistics_of_shard, and fills in `results`, the statistics after the argmax. Takes
        one more exchange.
        """
        if own.lse is None:
            return
        gathered = self.gather(torch.stack([numbers for numbers in own if numbers is not None])).unbind(1)
        numbers = iter(gathered)
        whole = statistics_of_shards(asked, changed(own, lambda _: next(numbers)))
        for result, found in zip(results, whole[1:], strict=True):
            if found is not None:
                result.copy_(torch.where(valid, found, 0.0))


def statistics_of_shard(asked: Statistics, like: Tensor) -> TokenStatistics:  # (N,) each, to be filled in
    """Memory for the statistics that a rank sends the others. They include its lse, which weighs the others. The argmax
    is exchanged with each chunk.
    """
    if not any(asked[1:]):
        return TokenStatistics()
    needed = asked._replace(argmax=False, lse=True)
    return TokenStatistics(*(torch.empty_like(like) if wanted else None for wanted in needed))


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
