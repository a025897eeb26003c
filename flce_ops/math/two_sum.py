"""A sum in two numbers."""

from torch import Tensor


def two_sum(large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and what rounding took from it (Knuth's two-sum; 0 where the sum is not finite, which makes nan).

    An lse of 1000 is right to 3e-5 in float32, and so would be every probability exp(z - lse) of its row.
    """
    total = large + small
    part = total - large
    rest = (large - (total - part)) + (small - part)
    return total, rest.nan_to_num(0.0)
