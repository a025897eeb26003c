"""The numbers of rows of logits: reductions over their classes, of which ranks may have shards. batch_invariant takes
them in blocks.

classes      0-127 │ 128-255 │ 256-383 │ 384-511      of each block a product of its own and a part of each sum
rank                0                  1              all_gather of the parts
every rank   part + part + part + part                in the order that one rank has, so the same bits
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..math.options import Statistics
from ..math.shards import Exchange, argmax_of_shards, shard_rows
from ..support.integers import cdiv
from .chunks import CLASSES_OF_EQUAL_BITS

# n rows of a chunk or of a block of one, V vocabulary, v classes of this rank, R ranks

BLOCK = CLASSES_OF_EQUAL_BITS  # a shard begins at a multiple


class OverClasses:
    """One rank has all classes, and the order of a sum is ATen's."""

    def sum(self, numbers: Tensor) -> Tensor:  # (n, v) -> (n,)
        return numbers.sum(1)

    def largest(self, row_max: Tensor) -> Tensor:  # (n, 1) of this rank's classes
        return row_max

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:  # (n, v) -> the largest logit and its class, (n,) each
        largest, column = logits.max(1)
        return largest, column

    def weight_sum(self, weight: Tensor | None, classes: int) -> Tensor | int:  # (v,), v -> sum_j w_j over V classes
        return classes if weight is None else weight.sum()

    def at_target(self, logit: Tensor, hit: Tensor | None) -> Tensor:
        """`hit` says which targets this rank has; the logits of others are 0."""
        return logit if hit is None else torch.where(hit, logit, 0.0)


ALL_AT_ONCE = OverClasses()


class InBlocks(OverClasses):
    def __init__(self, exchange: Exchange, vocab_start: int, num_classes: int) -> None:
        self.exchange, self.vocab_start = exchange, vocab_start
        self.num_classes, self.blocks = num_classes, cdiv(num_classes, BLOCK)  # of all ranks
        self.blocks_of_rank = cdiv(shard_rows(num_classes, exchange.ranks), BLOCK)

    def sum(self, numbers: Tensor) -> Tensor:
        whole = numbers.shape[1] // BLOCK * BLOCK
        parts = [
            numbers[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(2),
            numbers[:, whole:].sum(1, keepdim=True),
        ]
        own = torch.cat(parts[: 1 + (whole < numbers.shape[1])], 1)
        gathered = self.exchange.gather(pad(own, (0, self.blocks_of_rank - own.shape[1])))
        return gathered.movedim(0, 1).flatten(1)[:, : self.blocks].sum(1)

    def largest(self, row_max: Tensor) -> Tensor:
        return self.exchange.gather(row_max).amax(0)

    def argmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest, column = logits.max(1)
        if self.exchange.ranks == 1:
            return largest, column
        gathered = self.exchange.gather(torch.stack([largest, (column + self.vocab_start).to(largest.dtype)]))
        return gathered[:, 0].amax(0), argmax_of_shards(gathered[:, 0], gathered[:, 1])

    def weight_sum(self, weight: Tensor | None, classes: int) -> Tensor | int:
        return self.num_classes if weight is None else self.exchange.classes(weight, self.num_classes).sum()

    def at_target(self, logit: Tensor, hit: Tensor | None) -> Tensor:
        return self.exchange.gather(super().at_target(logit, hit)).sum(0)  # all but one are 0


def over_classes(call: Any) -> OverClasses:
    if not getattr(call, "batch_invariant", False):  # some operators do not have the option
        return ALL_AT_ONCE
    exchange = Exchange(getattr(call, "group", None), getattr(call, "ranks", 1))
    return InBlocks(exchange, getattr(call, "vocab_start", 0), call.num_classes)


def weighted_logits(logits: Tensor, weight: Tensor | None, over: OverClasses = ALL_AT_ONCE) -> Tensor:
    """sum_j w_j z_ij, (n,)."""
    if weight is None:
        return over.sum(logits)
    weight = weight.to(logits.dtype)
    return logits @ weight if over is ALL_AT_ONCE else over.sum(logits * weight)


def sum_from_lse(sum_from_maximum: Tensor, log_sum: Tensor, weight_sum: Tensor | int) -> Tensor:
    """sum_j w_j (z_ij - lse_i), from sum_j w_j (z_ij - row_max_i) and lse_i - row_max_i, (n,) each.

    If a bias of -inf switches off all classes of a shard, the sum is -inf, not nan.
    """
    return sum_from_maximum - weight_sum * torch.where(log_sum == -torch.inf, 0.0, log_sum)


def subtract_maximum(logits: Tensor, over: OverClasses = ALL_AT_ONCE) -> Tensor:  # (n,)
    """Replaces z by z - row_max in place. Returns row_max."""
    row_max = over.largest(finite_maximum(logits))
    logits.sub_(row_max)
    return row_max.squeeze(1)


def exponentiate(shifted: Tensor, over: OverClasses = ALL_AT_ONCE) -> Tensor:  # (n,)
    """Replaces z - row_max by E, its exponential, in place. Returns the row sums."""
    return over.sum(shifted.exp_())


def finite_maximum(logits: Tensor) -> Tensor:  # (n, 1)
    """The row maximum, or the lowest finite number if a shard has no class or a bias of -inf on all classes.
    Exponentials are then 0, not nan.
    """
    lowest = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0], 1), lowest)
    return logits.amax(1, keepdim=True).clamp_min_(lowest)


def row_moments(shifted: Tensor, over: OverClasses = ALL_AT_ONCE) -> tuple[Tensor, Tensor]:
    """Like exponentiate; also returns the row sums of E (z - row_max)."""
    copy = at_least_finite(shifted).clone()
    return exponentiate(shifted, over), over.sum(copy.mul_(shifted))


def log_sum_of_squares(exponentials: Tensor, row_sum: Tensor, over: OverClasses = ALL_AT_ONCE) -> Tensor:  # (n,)
    """log sum_j p_ij^2. The largest E of a row is 1, so neither sum underflows or overflows."""
    return over.sum(exponentials.square()).log_() - 2.0 * row_sum.log()


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
    moment: Tensor | None  # sum_j p_j (z_j - row_max)
    log_sum_sq_probs: Tensor | None
    mean_logit: Tensor | None


def reduce_rows(
    logits: Tensor,  # (n, v), overwritten with E
    asked: Statistics,
    num_classes: int,  # V
    weight: Tensor | None = None,  # (v,)
    weight_sum: Tensor | int | None = None,  # sum_j w_j; None if no logit sum is asked for
    over: OverClasses = ALL_AT_ONCE,
) -> BlockNumbers:
    max_logit, argmax = over.argmax(logits) if asked.argmax else (None, None)
    mean_logit = over.sum(logits) / num_classes if asked.mean_logit else None
    row_max = subtract_maximum(logits, over)
    logit_sum = None if weight_sum is None else weighted_logits(logits, weight, over)
    moment = None
    if asked.entropy:
        row_sum, first_moment = row_moments(logits, over)
        moment = first_moment / row_sum
    else:
        row_sum = exponentiate(logits, over)
    log_sum = row_sum.log()
    if logit_sum is not None:
        logit_sum = sum_from_lse(logit_sum, log_sum, weight_sum)
    squares = log_sum_of_squares(logits, row_sum, over) if asked.log_sum_sq_probs else None
    return BlockNumbers(row_max, row_sum, log_sum, logit_sum, max_logit, argmax, moment, squares, mean_logit)
