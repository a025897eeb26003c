"""loss = sum_i row_scale_i losses_i in float32, in a fixed order: a step's last launch, where ATen would take two."""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.replay import Kernel

# N tokens


@Kernel
@triton.jit
def sum_losses_kernel(
    losses_ptr,  # (N,), 0 where ignored
    row_scale_ptr,  # (N,)
    loss_ptr,  # () out
    N,
    BLOCK: tl.constexpr,
):
    """One program, as keep_tokens_kernel."""
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        losses = tl.load(losses_ptr + i, mask=i < N, other=0.0)
        acc += losses * tl.load(row_scale_ptr + i, mask=i < N, other=0.0)
    tl.store(loss_ptr, tl.sum(acc, 0))


def launch_sum_losses(losses: Tensor, row_scale: Tensor, loss: Tensor) -> None:
    sum_losses_kernel[(1,)](losses, row_scale, loss, losses.shape[0], BLOCK=4096, num_warps=8)
