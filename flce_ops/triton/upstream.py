"""Multiplies a gradient in place by the upstream gradient, which is nearly always 1: then nothing is read or written.

The factor stays on the device. ATen's in-place multiplication by a 0-d tensor took 2.4 of 39 ms at 8192x4096x128256.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scale_in_place_kernel(
    grad_ptr,  # (numel,)
    factor_ptr,  # ()
    numel,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step):
            offsets = start + tl.arange(0, BLOCK)
            mask = offsets < numel
            value = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
            tl.store(grad_ptr + offsets, (value * factor).to(grad_ptr.dtype.element_ty), mask=mask)


def launch_scale_in_place(grad: Tensor, factor: Tensor) -> None:
    if not grad.is_contiguous():  # the operators' are; a hook on saved tensors may hand over others
        grad.mul_(factor)
        return
    block = 4096
    programs = min(triton.cdiv(grad.numel(), block), 1024)
    if programs:
        scale_in_place_kernel[(programs,)](grad, factor, grad.numel(), BLOCK=block, num_warps=8)
