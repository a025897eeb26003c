"""The support of a token: the classes that it was sampled from, as top-k or top-p left them. Its probabilities are
normalised over these classes only.

    ids      │ 7 3 9 │ 4 - - │ - - - │ 5 5 2 │    of each token, padded; a token without ids has all classes
    ids      │ 7 3 9 │ 4 │       │ 5 5 2 │        or ragged
    classes    3 7 9   4 - -   - - -   2 5 -      each class once, in order; those of this shard, from its first one
    begins     0       3       6       9          of ragged ids nothing stands between the lists: 0 3 4 4
    ends       3       4       6       11                                                        3 4 4 6
    sizes      3       1       0       2          over all shards

In this form the support does not depend on the order and repetition of the ids. The lists contain no padding. Between
the lists of padded ids there is some, because moving the lists together would take a place of eight bytes for each id.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# N tokens, K ids of each, E ids of all, V vocabulary

NOTHING = torch.iinfo(torch.int32).max  # behind the classes of a padded list


class Support(NamedTuple):
    """The form that the operators take. Entries of `classes` outside of all lists have no meaning."""

    classes: Tensor  # (E,) int32
    begins: Tensor  # (N,) int64, rising; token i has classes[begins_i : ends_i]
    ends: Tensor  # (N,) int64
    sizes: Tensor  # (N,) int64


class PaddedIds(NamedTuple):
    """The caller's ids, one row a token; -1 is padding."""

    ids: Tensor  # (N, K)

    def read(self, counts: Tensor) -> Tensor:  # (N,) bool -> (N, K) bool
        """Whether the id belongs to a valid token. Ids that do not may be anything."""
        return counts.unsqueeze(1).expand_as(self.ids)

    def named(self, counts: Tensor) -> Tensor:
        return self.read(counts) & (self.ids >= 0)

    def hold(self, target: Tensor, counts: Tensor) -> Tensor:  # (N,) -> (N,) bool
        """Whether the target is among its token's ids, or the token has none or does not count."""
        named = self.named(counts)
        return (named & (self.ids == target.unsqueeze(1))).any(1) | ~named.any(1)

    def support(self, counts: Tensor, num_classes: int, shard: slice) -> Support:
        """The support's part on a shard, which has the classes `shard`."""
        classes = torch.where(self.named(counts), self.ids.int(), NOTHING).sort(1).values
        classes = torch.where(classes == pad(classes, (1, 0), value=-1)[:, :-1], NOTHING, classes).sort(1).values
        rows = torch.arange(classes.shape[0], device=classes.device) * classes.shape[1]
        begins, ends = (rows + (classes < bound).sum(1) for bound in (shard.start, shard.stop))
        return Support((classes - shard.start).flatten(), begins, ends, (classes < NOTHING).sum(1))


class RaggedIds(NamedTuple):
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

    def read(self, counts: Tensor) -> Tensor:  # (N,) bool -> (E,) bool
        return self.owners(counts)[1]

    def hold(self, target: Tensor, counts: Tensor) -> Tensor:  # (N,) -> (N,) bool
        """As PaddedIds.hold."""
        behind, read = self.owners(counts)
        named = read & (self.ids >= 0)
        is_target = named & (self.ids == pad(target, (1, 0))[behind])
        nothing = behind.new_zeros(counts.shape[0] + 1)
        ids, hits = (nothing.index_add(0, behind, these.long())[1:] for these in (named, is_target))
        return (hits > 0) | (ids == 0)

    def support(self, counts: Tensor, num_classes: int, shard: slice) -> Support:
        """As PaddedIds.support. Each (token, class) is one integer; entries that are no id come last."""
        behind, read = self.owners(counts)
        named = read & (self.ids >= 0)
        of_token = torch.arange(counts.shape[0] + 1, device=counts.device) * num_classes  # the token's smallest pair
        none = of_token[-1:]  # a tensor, because a symbolic number would become a constant of the graph
        pairs = torch.where(named, (behind - 1) * num_classes + self.ids, none)
        del behind, read, named  # the sort takes five times its numbers
        pairs = pairs.sort().values
        distinct = (pairs != pad(pairs, (1, 0), value=-1)[:-1]) & (pairs < none)
        column = pairs % num_classes - shard.start
        here = distinct & (column >= 0) & (column < shard.stop - shard.start)
        behind = pad(here.cumsum(0), (1, 0))
        last = torch.arange(behind.shape[0], device=column.device)[-1:]  # where entries of other shards go
        place, found = torch.where(here, behind[:-1], last), torch.full_like(behind, -1, dtype=torch.int32)
        classes = found.scatter_(0, place, column.int())[:-1]
        begins = torch.searchsorted(pairs, of_token)
        offsets, sizes = behind[begins], pad(distinct.cumsum(0), (1, 0))[begins].diff()
        return Support(classes, offsets[:-1], offsets[1:], sizes)


TokenIds = PaddedIds | RaggedIds
