"""The dtype in which sums are kept."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 operands, float32 for all others: the dtype of the softmax, of the loss and of their sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
