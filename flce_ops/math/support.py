"""The support of a token: the classes that it was sampled from, as top-k or top-p left them. Its probabilities are
normalised over these classes only.

    ids      │ 7 3 9 │ 4 │       │ 5 5 2 │    of each token, ragged; a token without ids has all classes
    classes  │ 3 7 9 │ 4 │       │ 2 5 │      each class once, in order; those of this shard, from its first one
    offsets    0       3   4       4     6
    sizes      3       1   0       2          over all shards

In this form the support does not depend on the order and repetition of the ids, and the lists contain no padding.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# N tokens, E ids of all of them, V vocabulary


class TokenIds(NamedTuple):
    """The caller's ids: token i has ids[begins_i : ends_i]. The lists are in the order of the tokens; -1 is padding."""

    ids: Tensor  # (E,) int64
    begins: Tensor  # (N,) int64
    ends: Tensor  # (N,) int64

    def owners(self, counts: Tensor) -> tuple[Tensor, Tensor]:  # (N,) bool -> (E,), (E,) bool
        """Returns 1 + the token of each id (0 before the first list), and whether the id belongs to a valid token. Ids
        that do not may be anything.
        """
        place = torch.arange(self.ids.shape[0], device=counts.device)
        behind = torch.searchsorted(self.begins, place, right=True)
        return behind, (place < pad(self.ends, (1, 0))[behind]) & pad(counts, (1, 0))[behind]

    def hold(self, target: Tensor, counts: Tensor) -> Tensor:  # (N,) -> (N,) bool
        """Whether the target is among its token's ids, or the token has none or does not count."""
        behind, read = self.owners(counts)
        named = read & (self.ids >= 0)
        is_target = named & (self.ids == pad(target, (1, 0))[behind])
        nothing = behind.new_zeros(counts.shape[0] + 1)
        ids, hits = (nothing.index_add(0, behind, these.long())[1:] for these in (named, is_target))
        return (hits > 0) | (ids == 0)


class Support(NamedTuple):
    """The form that the operators take. Entries of `classes` from offsets[N] on have no meaning."""

    classes: Tensor  # (E,) int64
    offsets: Tensor  # (N + 1,) int64
    sizes: Tensor  # (N,) int64


class SortedIds:
    """The ids of the valid tokens, sorted by token and then by class. Each (token, class) is one integer; entries that
    are no id come last.
    """

    def __init__(self, given: TokenIds, counts: Tensor, num_classes: int) -> None:
        tokens, self.num_classes = counts.shape[0], num_classes
        behind, read = given.owners(counts)
        named = read & (given.ids >= 0)
        self.of_token = torch.arange(tokens + 1, device=counts.device) * num_classes  # the token's smallest pair
        self.none = self.of_token[-1:]  # a tensor, because a symbolic number would become a constant of the graph
        pairs = torch.where(named, (behind - 1) * num_classes + given.ids, self.none)
        del behind, read, named  # the sort takes five times its numbers
        self.pairs = pairs.sort().values

    def support(self, classes: slice) -> Support:
        """The support's part on a shard, which has `classes`."""
        distinct = (self.pairs != pad(self.pairs, (1, 0), value=-1)[:-1]) & (self.pairs < self.none)
        column = self.pairs % self.num_classes - classes.start
        here = distinct & (column >= 0) & (column < classes.stop - classes.start)
        behind = pad(here.cumsum(0), (1, 0))
        last = torch.arange(behind.shape[0], device=column.device)[-1:]  # where entries of other shards go
        found = torch.full_like(behind, -1).scatter_(0, torch.where(here, behind[:-1], last), column)
        begins = torch.searchsorted(self.pairs, self.of_token)
        return Support(found[:-1], behind[begins], pad(distinct.cumsum(0), (1, 0))[begins].diff())
