"""The dtype in which sums are kept, and a sum in two numbers."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the softmax, of the loss and of their sums. Checks elsewhere refuse dtypes that operands may not
    have.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32


def two_sum(large: Tensor, small: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rounded sum, and what rounding took from it (Knuth's two-sum). The second is 0 if the sum is not
    finite.

    In float32 an lse of 1000 has an error of 3e-5, and every probability exp(z - lse) of its row would inherit that
    error.
    """
    total = large + small
    part = total - large
    rest = (large - (total - part)) + (small - part)
    return total, rest.nan_to_num(0.0)
