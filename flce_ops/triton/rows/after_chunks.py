"""What is left after the last chunk, in one launch: the scalar loss, and rows of grad_input at their tokens' places.

    the loss    the sum of the tokens' losses in float32, in a fixed order; ATen's operators would take several launches
    the rows    in place, from the last one to the first, because no row moves to a lower place:

                 valid tokens first         where the tokens are
    place        0 1 2 3 - -       ->       0 - 1 - 2 3

Also the row scales of a reduction, as kernels read them.

A one-pass step's backward multiplies the gradients in place by grad_output. That is nearly always 1, and the kernel
then neither reads nor writes the gradients. The factor stays on the device. ATen's in-place multiplication by a 0-d
tensor took 2.4 of 39 ms at 8192x4096x128256."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.token_weights_and_denominator import Reduction
from ...support.sizes import cdiv
from ..gemm.tiles import interpreted, load_tile, matrix_of, store_tile
from ..kernel import Kernel

# N tokens, D columns


class LossSum(NamedTuple):
    """Passed to kernels as one argument."""

    losses: Tensor  # (N,), 0 where ignored
    reduction: Reduction
    loss: Tensor  # () out


@Kernel
def after_chunks_kernel(
    loss_sum,  # LossSum, with SUMS
    matrix,  # (N, D), with MOVES
    place_ptr,  # (N,)
    total_ptr,  # (), the number of valid tokens
    N,
    D,
    SUMS: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,  # losses
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program = tl.program_id(0)
    if SUMS:
        if program == 0:
            sum_losses(loss_sum, total_ptr, N, BLOCK)
        program -= 1
    if MOVES:
        if program >= 0:
            move_rows(matrix, place_ptr, total_ptr, program * BLOCK_D + tl.arange(0, BLOCK_D), N, D, BLOCK_N)


@triton.jit
def sum_losses(loss_sum, total_ptr, N, BLOCK: tl.constexpr):
    """One program sums all N losses."""
    row_scale = loss_sum.reduction.row_scale
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        losses = tl.load(loss_sum.losses + i, mask=i < N, other=0.0)
        if row_scale is not None:
            losses *= tl.load(row_scale + i, mask=i < N, other=0.0)
        acc += losses
    loss = tl.sum(acc, 0)
    if row_scale is None:
        loss = tl.div_rn(loss, divisor_of_mean(loss_sum.reduction, total_ptr))
    tl.store(loss_sum.loss, loss)


@triton.jit
def move_rows(matrix, place_ptr, total_ptr, cols, N, D, BLOCK_N: tl.constexpr):
    """One program owns a few columns. It reads a block of rows, then writes it. The rows it reads afterwards stand
    before the block, so no barrier has to wait for the writes. If all tokens are valid there is nothing to do.
    """
    blocks = tl.where(tl.load(total_ptr) < N, tl.cdiv(N, BLOCK_N), 0)
    for block in range(0, blocks):
        rows = (blocks - 1 - block) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = tl.load(place_ptr + rows, mask=rows < N, other=-1)
        values = load_tile(matrix, place, cols, place >= 0, cols < D)
        tl.debug_barrier()  # the whole block is read before any of it is written
        store_tile(matrix, values, rows, cols, rows < N, cols < D)


@triton.jit
def divisor_of_mean(reduction, total_ptr):
    if reduction.denominator is not None:
        return tl.load(reduction.denominator).to(tl.float32)
    return tl.load(total_ptr).to(tl.float32)


@triton.jit
def scale_of_rows(reduction, valid_tokens, token, mask):
    """The row scales g of these tokens."""
    if reduction.row_scale is not None:
        return tl.load(reduction.row_scale + token, mask=mask, other=0.0)
    else:
        return tl.div_rn(1.0, divisor_of_mean(reduction, valid_tokens.total))


def launch_after_chunks(
    total: Tensor,  # (), the number of valid tokens
    loss_sum: LossSum | None,
    matrix: Tensor | None = None,  # (N, D); row k moves to the place of the k-th valid token, and ignored ones become 0
    place: Tensor | None = None,  # (N,), given together with `matrix`
) -> None:
    tokens, columns = (loss_sum.losses.shape[0], 0) if matrix is None else matrix.shape
    # A program has 32 columns, 64 bytes of 16-bit numbers, so there are 128 programs at D = 4096. With fewer columns
    # per program the kernel takes 1.5 times as long. With fewer rows at a time it waits for memory more often: 23 us at
    # 8192x1024 with 1024 rows, 33 us with 256 (H200).
    block_d, sums = 64 if interpreted(total) else 32, loss_sum is not None
    after_chunks_kernel[(sums + cdiv(columns, block_d),)](
        loss_sum,
        None if matrix is None else matrix_of(matrix),
        place,
        total,
        tokens,
        columns,
        SUMS=sums,
        MOVES=matrix is not None,
        BLOCK=4096,
        BLOCK_N=1024,
        BLOCK_D=block_d,
        num_warps=8,
    )


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
