"""An objective whose slopes are given: what backward brings for the numbers of a row, whatever made a loss of them."""

from typing import NamedTuple

from torch import Tensor

from flce_ops.objectives.language import RowFunction, of_tokens, where

# N tokens


@RowFunction
def of_target(surprisal, weight, at, given):
    slope = where(surprisal < 0.0, 0.0, 0.0)
    if given.grad_target_logit is not None:
        slope = -of_tokens(given.grad_target_logit, at)
    return slope, slope


@RowFunction
def of_row(value, slope, lse, logit_sum, at, given):
    d_lse = where(lse < 0.0, 0.0, 0.0)
    if given.grad_lse is not None:
        d_lse = of_tokens(given.grad_lse, at)
    return value, d_lse


class GivenSlopes(NamedTuple):
    """(N,) each, None for 0. The value is not a loss, and no one reads it."""

    grad_target_logit: Tensor | None
    grad_lse: Tensor | None

    per_token = ("grad_target_logit", "grad_lse")
    bounded = False
    d_sum = None
    of_target = of_target
    of_row = of_row
