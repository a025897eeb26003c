"""A function of one token as a row objective.

ATen calls FunctionObjective for a block of rows. In Triton a kernel finds the row numbers, the function runs on these
(triton/rows/token_numbers.py), and the kernel that finishes rows reads its results: GivenLosses.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .row import RowFunction, RowObjective, Slope, of_tokens
from .token_function import HARMLESS

# N tokens, n of a block or chunk, K classes of each


def zero_where(ignored: Tensor, tensor: Tensor) -> Tensor:  # (N,), (N, ...)
    """The tensor of a token function, with 0 where no token counts. A 0-d tensor stays."""
    return tensor.masked_fill(ignored.view(-1, *[1] * (tensor.dim() - 1)), 0) if tensor.dim() else tensor


def harmless(name: str, numbers: Tensor, counts: Tensor) -> Tensor:
    """Numbers of rows as a function reads them."""
    return torch.where(counts, numbers, HARMLESS[name])


class FunctionObjective(RowObjective):
    """`options` is a TokenLoss, `tokens` a tuple of its tensors, (N, ...) or (). In ATen `weight` says which targets
    count, (N,) or (N, K) bool.
    """

    bounded = True

    def of(self, rows: slice) -> "FunctionObjective":
        tokens = tuple(tensor[rows] if tensor.dim() else tensor for tensor in self.tokens)
        return self._replace(tokens=tokens, weight=None if self.weight is None else self.weight[rows])

    def losses_and_slopes(
        self, surprisal: Tensor, lse: Tensor, logit_sum: Tensor | None
    ) -> tuple[Tensor, tuple[Slope, Slope]]:
        function, counts, again = self.options, self.weight, torch.is_grad_enabled() and surprisal.requires_grad
        assert counts is not None
        valid = counts.any(-1) if self.soft else counts
        read = harmless("lse", lse, valid) if "lse" in function.reads else None
        log_prob = harmless("log_prob", -surprisal, counts)
        losses, slopes = function.losses_and_slopes(log_prob, read, self.tokens, create_graph=again)
        d_target = torch.where(counts, slopes.log_prob, 0.0)  # a slope may be nan where no token counts
        d_lse = -(d_target.sum(-1) if self.soft else d_target)
        return losses, (d_target, d_lse if slopes.lse is None else d_lse + torch.where(valid, slopes.lse, 0.0))


class LossesOfRows(NamedTuple):
    losses: Tensor  # (n,)
    by_lse: Tensor | None  # (n,)


class GivenLosses(RowObjective):
    """`tokens` is a LossesOfRows, `weight` the derivatives by log_prob, (n,) or (n, K): by rows of the chunk."""

    bounded = True
    by_row = True

    @RowFunction
    def of_target(surprisal, weight, at, given):
        return 0.0 * weight, -weight

    @RowFunction
    def of_row(value, slope, lse, logit_sum, at, given):
        d_lse = slope
        if given.tokens.by_lse is not None:
            d_lse = slope + of_tokens(given.tokens.by_lse, at)
        return of_tokens(given.tokens.losses, at), d_lse
