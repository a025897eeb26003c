"""Whether a derivative by a tensor may be asked for: if not, nothing needs the graph of what is computed from it."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce_ops.support.torch_private import functorch_is_active


def differentiated(*tensors: Tensor | None) -> bool:
    """By one of them: by reverse mode, forward mode, or a transform of torch.func, which hides what it wants."""
    if functorch_is_active():
        return True
    grad_enabled = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if (grad_enabled and tensor.requires_grad) or forward_ad.unpack_dual(tensor).tangent is not None:
            return True
    return False
