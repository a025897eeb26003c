"""Whether a derivative by a tensor may be asked for: if not, nothing needs the graph of what is computed from it."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flce_ops.support.torch_private import forward_mode_is_active, functorch_is_active


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether forward mode goes through one of them."""
    if not forward_mode_is_active():
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def differentiated(*tensors: Tensor | None) -> bool:
    """By one of them: by reverse mode, forward mode, or a transform of torch.func, which hides what it wants."""
    if functorch_is_active() or has_tangent(*tensors):
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
