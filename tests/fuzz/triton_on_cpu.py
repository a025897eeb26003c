"""The Triton kernels in place of the ATen ones for CPU tensors, in Triton's interpreter.

float32 stands in for bfloat16, whose products the interpreter makes wrong; float16 goes where it goes on CUDA.
"""

import torch
from torch import Tensor

from flce_ops import aten

_library = torch.library.Library("flce", "IMPL")  # its kernels live as long as this does


def takes(input: Tensor) -> bool:
    return input.dtype in (torch.float32, torch.float16) and input.numel() > 0


def forward(input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    from flce_ops.triton import launch_forward

    return (launch_forward if takes(input) else aten.forward)(input, *args, **options)


def backward(grad_target_logit, grad_lse, grad_logit_sum, input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    from flce_ops.triton import launch_backward

    kernel = launch_backward if takes(input) else aten.backward
    return kernel(grad_target_logit, grad_lse, grad_logit_sum, input, *args, **options)


def with_grad(input: Tensor, *args, **options) -> tuple[Tensor, ...]:
    from flce_ops.triton import launch_with_grad

    smoothed_and_capped = options.get("label_smoothing") and options.get("softcap") is not None
    triton = takes(input) and input.dtype != torch.float16 and not smoothed_and_capped
    return (launch_with_grad if triton else aten.with_grad)(input, *args, **options)


def install() -> None:
    for kernel in (forward, backward, with_grad):
        _library.impl(f"linear_cross_entropy_{kernel.__name__}", kernel, "CPU")
