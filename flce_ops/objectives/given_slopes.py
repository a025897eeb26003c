"""An objective whose slopes are given: they are the cotangents of a row's numbers that backward receives from autograd,
for any loss.
"""

from .row import RowFunction, RowObjective, of_tokens, where


class GivenSlopes(RowObjective):
    """`tokens` is a Cotangents, where None stands for 0. The value is not a loss, and nothing reads it."""

    @RowFunction
    def of_target(surprisal, weight, at, given):
        slope = where(surprisal < 0.0, 0.0, 0.0)
        if given.tokens.grad_target_logit is not None:
            slope = -of_tokens(given.tokens.grad_target_logit, at)
        return slope, slope

    @RowFunction
    def of_row(value, slope, lse, logit_sum, at, given):
        d_lse = where(lse < 0.0, 0.0, 0.0)
        if given.tokens.grad_lse is not None:
            d_lse = of_tokens(given.tokens.grad_lse, at)
        return value, d_lse
