"""Multiplies gradients in place by grad_output. grad_output is nearly always 1. In that case the kernel neither reads
nor writes the gradients.

The factor stays on the device. ATen's in-place multiplication by a 0-d tensor took 2.4 of 39 ms at 8192x4096x128256.
"""

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..kernel import Kernel

BLOCK = tl.constexpr(4096)  # numbers that a program multiplies at a time


@Kernel
def scale_in_place_kernel(
    grads,  # pointers
    numbers,  # how many numbers each has
    factor_ptr,  # ()
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for index in tl.static_range(len(grads)):
            for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numbers[index], step):
                offsets = start + tl.arange(0, BLOCK)
                mask = offsets < numbers[index]
                value = tl.load(grads[index] + offsets, mask=mask).to(tl.float32)
                tl.store(grads[index] + offsets, (value * factor).to(grads[index].dtype.element_ty), mask=mask)


def launch_scale_in_place(grads: Sequence[Tensor], factor: Tensor) -> None:
    contiguous = []
    for grad in grads:
        if grad.is_contiguous():
            contiguous.append(grad)
        else:  # the operators' gradients are contiguous, but a hook on saved tensors may return others
            grad.mul_(factor)
    numbers = tuple(grad.numel() for grad in contiguous)
    if any(numbers):
        programs = min(cdiv(max(numbers), BLOCK.value), 1024)
        with torch.cuda.device_of(factor):
            scale_in_place_kernel[(programs,)](tuple(contiguous), numbers, factor, num_warps=8)
