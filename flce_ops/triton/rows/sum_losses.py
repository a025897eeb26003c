"""The scalar loss from the losses of tokens, in float32 and in a fixed order, in one launch. With ATen's operators it
would take several.

Also the row scales of a reduction, as kernels read them.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...math.reduction import Reduction
from ..kernel import Kernel

# N tokens


@Kernel
def sum_losses_kernel(
    losses_ptr,  # (N,), 0 where ignored
    reduction,  # Reduction
    valid_total_ptr,  # (), the number of valid tokens
    loss_ptr,  # () out
    N,
    BLOCK: tl.constexpr,
):
    """One program sums all N losses."""
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        losses = tl.load(losses_ptr + i, mask=i < N, other=0.0)
        if reduction.row_scale is not None:
            losses *= tl.load(reduction.row_scale + i, mask=i < N, other=0.0)
        acc += losses
    loss = tl.sum(acc, 0)
    if reduction.row_scale is None:
        loss = tl.div_rn(loss, divisor_of_mean(reduction, valid_total_ptr))
    tl.store(loss_ptr, loss)


@triton.jit
def divisor_of_mean(reduction, valid_total_ptr):
    if reduction.denominator is not None:
        return tl.load(reduction.denominator).to(tl.float32)
    return tl.load(valid_total_ptr).to(tl.float32)


@triton.jit
def scale_of_rows(reduction, valid_tokens, token, mask):
    """The row scales g of these tokens."""
    if reduction.row_scale is not None:
        return tl.load(reduction.row_scale + token, mask=mask, other=0.0)
    else:
        return tl.div_rn(1.0, divisor_of_mean(reduction, valid_tokens.total))


def launch_sum_losses(losses: Tensor, reduction: Reduction, valid_total: Tensor, loss: Tensor) -> None:
    sum_losses_kernel[(1,)](losses, reduction, valid_total, loss, losses.shape[0], BLOCK=4096, num_warps=8)
