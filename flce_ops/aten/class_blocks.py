"""Reductions of rows over their classes, of which ranks may have shards: batch_invariant takes them in blocks.

classes      0-127 │ 128-255 │ 256-383 │ 384-511      of each block a product of its own and a part of each sum
rank                0                  1              all_gather of the parts
every rank   part + part + part + part                in the order that one rank has, so the same bits
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..math.shards import Exchange, argmax_of_shards, shard_rows
from .chunks import CLASSES_OF_EQUAL_BITS

# n rows, V vocabulary, v classes of this rank, R ranks

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

    def number_of(self, classes: int) -> int:
        return classes

    def per_class(self, numbers: Tensor) -> Tensor:  # (v,) -> (V,)
        return numbers

    def at_target(self, logit: Tensor, hit: Tensor | None) -> Tensor:
        """`hit` says which targets this rank has; the logits of others are 0."""
        return logit if hit is None else torch.where(hit, logit, 0.0)


ALL_AT_ONCE = OverClasses()


class InBlocks(OverClasses):
    def __init__(self, exchange: Exchange, vocab_start: int, num_classes: int) -> None:
        self.exchange, self.vocab_start = exchange, vocab_start
        self.num_classes, self.blocks = num_classes, -(-num_classes // BLOCK)  # of all ranks
        self.blocks_of_rank = -(-shard_rows(num_classes, exchange.ranks) // BLOCK)

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

    def number_of(self, classes: int) -> int:
        return self.num_classes

    def per_class(self, numbers: Tensor) -> Tensor:
        return self.exchange.classes(numbers, self.num_classes)

    def at_target(self, logit: Tensor, hit: Tensor | None) -> Tensor:
        return self.exchange.gather(super().at_target(logit, hit)).sum(0)  # all but one are 0


def over_classes(call: Any) -> OverClasses:
    if not getattr(call, "batch_invariant", False):  # some operators do not have the option
        return ALL_AT_ONCE
    exchange = Exchange(getattr(call, "group", None), getattr(call, "ranks", 1))
    return InBlocks(exchange, getattr(call, "vocab_start", 0), call.num_classes)
