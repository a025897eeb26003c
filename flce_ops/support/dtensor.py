"""Whether DTensors are among the arguments. Does not import torch.distributed.tensor for users without DTensors."""

import sys

from torch import Tensor


def any_dtensor(*tensors: Tensor | None) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)
