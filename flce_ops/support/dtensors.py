"""Whether DTensors are among the arguments."""

import sys

from torch import Tensor


def any_dtensor(*tensors: Tensor | None) -> bool:
    """Does not import torch.distributed.tensor for users without DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for tensor in tensors:
            if isinstance(tensor, module.DTensor):
                return True
    return False
