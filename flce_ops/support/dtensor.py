"""Whether DTensors are among the arguments. Does not import torch.distributed.tensor for users without DTensors."""

import sys

from torch import Tensor


def any_dtensor(*tensors: Tensor | None) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        for tensor in tensors:
            if isinstance(tensor, module.DTensor):
                return True
    return False
