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
    """`options` is a TokenLoss, `tokens` a tuple of its tensors, (N, ...) or (). `weight` says which of a token's K
    classes count, (N, K) bool; None with one class a token.
    """

    bounded = True
    surprisal_at_ignored = -HARMLESS["log_prob"]

    def of(self, rows: slice) -> "FunctionObjective":
        tokens = tuple(tensor[rows] if tensor.dim() else tensor for tensor in self.tokens)
        return self._replace(tokens=tokens, weight=None if self.weight is None else self.weight[rows])

    def losses_and_slopes(
        self, surprisal: Tensor, lse: Tensor, logit_sum: Tensor | None
    ) -> tuple[Tensor, tuple[Slope, Slope]]:
        log_prob, again = -surprisal, torch.is_grad_enabled() and surprisal.requires_grad
        if self.weight is not None:
            log_prob = harmless("log_prob", log_prob, self.weight)
        reads_lse = "lse" in self.options.reads
        losses, slopes = self.options.losses_and_slopes(
            log_prob, lse if reads_lse else None, self.tokens, create_graph=again
        )
        d_target = slopes.log_prob if self.weight is None else torch.where(self.weight, slopes.log_prob, 0.0)
        d_lse = -d_target if self.weight is None else -d_target.sum(-1)
        return losses, (d_target, d_lse if slopes.lse is None else d_lse + slopes.lse)


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
