"""The operator that a public function calls."""

from collections.abc import Callable

import torch
from torch import Tensor

from flce_ops.support.dtensor import any_dtensor


def entry_of(op: torch._ops.OpOverloadPacket, body: Callable, *tensors: Tensor | None) -> Callable:
    """`op`, whose body autograd's key runs; in inference mode DTensor would see it first and refuse plain tensors."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return body if inference and any_dtensor(*tensors) else op
