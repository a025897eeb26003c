"""The dtype in which sums are kept."""

import torch


class Sums(dict):
    def __missing__(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32  # dtypes that operands may not have are refused later


SUMS = Sums(dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float32))
SUMS[torch.float64] = torch.float64
# The dtype of the softmax, of the loss and of their sums. A dictionary's lookup is faster than a function, and every
# call needs it often.
accumulation_dtype = SUMS.__getitem__
