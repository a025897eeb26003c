"""Saved logits of 16 bits each: the epilogue of forward's GEMM writes them, and backward makes G from them without a
GEMM.

    m_it = max_j z_ij of the classes j of tile t                              float32
    q_ij = 65535 + round(steps (z_ij - m_it)), or 0 if that is negative       16 bits
    z_ij = m_it + (q_ij - 65535) / steps, -inf if q is 0                      within 1 / (2 steps), in base 2

Logits are rounded to multiples of one step. bfloat16 operands take 1024 steps for a factor of 2 in p. This rounding
changes p by 2e-4 of itself (standard deviation), and rounding G to bfloat16 changes it by 1.7e-3. Entries below 2^-64
of the largest p in their tile become 0. float16 operands take 2048 steps. Then p changes by 1e-4, while rounding to
float16 costs 2.1e-4, and entries below 2^-32 become 0. Exponentials cannot be stored instead. Relative to their
reference, the target's logit, they may be as large as 2^60, beyond float16's range. bfloat16 has that range, but its
rounding would add an error as large as that of rounding G.

              V numbers, rows starting on 16 bytes    T maxima
    row i     q_i0 q_i1 ...                      ..   m_i0 m_i1 ...      ..
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.integers import cdiv
from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows

# n rows, V vocabulary, T tiles along it

LARGEST_Q = tl.constexpr(65535.0)
ROUND = tl.constexpr(2.0**23)  # a float32 of this size has no fraction, so its last bits are the integer that was added


class QuantizedLogits(NamedTuple):
    """Passed to kernels as one argument."""

    numbers: Tensor  # (n, V) int16, read as unsigned q
    largest: Tensor  # (n, T) float32, m, base 2
    stride: int  # distance between the rows of `largest`
    steps: int

    def of(self, rows: slice) -> "QuantizedLogits":
        return self._replace(numbers=self.numbers[rows], largest=self.largest[rows])


def quantized(numbers: Tensor, largest: Tensor, dtype: torch.dtype) -> QuantizedLogits:
    """`dtype` is the dtype of the operands."""
    return QuantizedLogits(numbers, largest, largest.stride(0), 2048 if dtype == torch.float16 else 1024)


def quantized_of(retained: Tensor, num_classes: int, dtype: torch.dtype) -> QuantizedLogits:
    """A view of memory that flce_ops/meta allocates: (n, columns) int16, numbers and then maxima."""
    largest = retained.view(torch.float32)[:, cdiv(num_classes, 8) * 4 :]
    return quantized(retained[:, :num_classes], largest, dtype)


@Kernel
def clear_unused_kernel(
    saved_ptr,  # (R, columns) int16
    valid_tokens,  # ValidTokens
    rows,
    V,
    first_maximum,  # first column of the maxima
    behind_maxima,  # the column after the maxima
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    whole = row >= valid_rows(valid_tokens, rows)
    for start in range(tl.where(whole, 0, V), columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        unused = (cols < tl.where(whole, columns, first_maximum)) | (cols >= behind_maxima)
        tl.store(saved_ptr + row.to(tl.int64) * columns + cols, 0, mask=unused & (cols < columns))


def clear_unused(retained: Tensor, num_classes: int, tile: int, valid_tokens: ValidTokens) -> None:
    """Writes zeros wherever nothing else is written, so that an operator's result does not depend on uninitialised
    memory.
    """
    if not retained.shape[0]:
        return
    first_maximum = 8 * cdiv(num_classes, 8)
    behind_maxima = first_maximum + 2 * cdiv(num_classes, tile)
    rows, columns = retained.shape
    clear_unused_kernel[(rows,)](
        retained, valid_tokens, rows, num_classes, first_maximum, behind_maxima, columns, BLOCK=1024, num_warps=4
    )


@triton.jit
def largest_places(quantized, rows, tile):
    return quantized.largest + rows.to(tl.int64) * quantized.stride + tile


@triton.jit
def quantize(z, largest, steps):
    """`largest` (n,) holds the maxima of the rows of z. If a row is all -inf, it may be any finite number.

    The compiler may fuse the product that z is with this subtraction. Then z - largest is not 0 at the maximum but the
    rounding of z, which is more than half a step if |z| is above 4096. Without the minimum, q would be 65536, so 0.
    """
    q = tl.minimum(tl.maximum((z - largest[:, None]) * steps + LARGEST_Q, 0.0), LARGEST_Q)
    return (q + ROUND).to(tl.int32, bitcast=True).to(tl.int16)


@triton.jit
def dequantize(q, largest, steps):
    q = q.to(tl.int32) & 0xFFFF
    z = largest[:, None] + (q.to(tl.float32) - LARGEST_Q) * (1.0 / steps)
    return tl.where(q > 0, z, float("-inf"))
