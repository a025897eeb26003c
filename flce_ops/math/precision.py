"""The dtype in which sums are kept."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the softmax, of the loss and of their sums. Checks elsewhere refuse dtypes that operands may not
    have.
    """
    return torch.float64 if dtype is torch.float64 else torch.float32
