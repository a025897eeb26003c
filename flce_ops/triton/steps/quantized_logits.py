"""Saved logits, 16 bits each: forward writes them as they leave its GEMM, backward makes G of them without one.

    m_it = max_j z_ij of the classes j of tile t                              float32
    q_ij = 65535 + round(steps (z_ij - m_it)), 0 where that is negative       16 bits
    z_ij = m_it + (q_ij - 65535) / steps, -inf where q is 0                   within 1 / (2 steps), in base 2

It is the logit that is rounded, but by the same step wherever it is: with 1024 steps a factor of 2, p moves by 2e-4 of
itself (standard deviation), where bfloat16 moves it by 1.7e-3 when G is rounded, and what is left out has less than
2^-64 of the largest p in its tile. float16 operands take 2048 steps: 1e-4, where float16 rounds by 2.1e-4, and 2^-32.
Exponentials would not do: the target's logit, their reference, may be 60 binades below the largest, and float16 has 40;
bfloat16 has the range, and rounds a second time what is rounded when G is made.

              V numbers, rows starting on 16 bytes    T maxima
    row i     q_i0 q_i1 ...                      ..   m_i0 m_i1 ...      ..
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.replay import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows

# n rows, V vocabulary, T tiles along it

LARGEST_Q = tl.constexpr(65535.0)
ROUND = tl.constexpr(2.0**23)  # a float32 of this size has no fraction, and its last bits are the number that was added


class QuantizedLogits(NamedTuple):
    numbers: Tensor  # (n, V) int16, whose bits are q
    largest: Tensor  # (n, T) float32, m, base 2

    def of(self, rows: slice) -> "QuantizedLogits":
        return QuantizedLogits(self.numbers[rows], self.largest[rows])


class Quantization(NamedTuple):
    """What a kernel needs beside the numbers."""

    largest: Tensor  # (n, T)
    stride: int  # of its rows
    steps: int


def quantized_of(retained: Tensor, num_classes: int) -> QuantizedLogits:
    """In memory as flce_ops/meta allocates it, (n, columns) int16."""
    return QuantizedLogits(
        retained[:, :num_classes], retained.view(torch.float32)[:, triton.cdiv(num_classes, 8) * 4 :]
    )


def quantization(quantized: QuantizedLogits, dtype: torch.dtype) -> Quantization:
    """`dtype` is the operands'."""
    return Quantization(quantized.largest, quantized.largest.stride(0), 2048 if dtype == torch.float16 else 1024)


@Kernel
def clear_unused_kernel(
    saved_ptr,  # (R, columns) int16
    valid_tokens,  # ValidTokens
    rows,
    V,
    first_maximum,  # column
    behind_maxima,  # column
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    whole = row >= valid_rows(valid_tokens, rows)
    for start in range(tl.where(whole, 0, V), columns, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        unused = whole | (cols < first_maximum) | (cols >= behind_maxima)
        tl.store(saved_ptr + row.to(tl.int64) * columns + cols, 0, mask=unused & (cols < columns))


def clear_unused(retained: Tensor, num_classes: int, tile: int, valid_tokens: ValidTokens) -> None:
    """Zeros where nothing else is written, so that an operator's result does not depend on what memory held."""
    if not retained.shape[0]:
        return
    first_maximum = 8 * triton.cdiv(num_classes, 8)
    behind_maxima = first_maximum + 2 * triton.cdiv(num_classes, tile)
    rows, columns = retained.shape
    clear_unused_kernel[(rows,)](
        retained, valid_tokens, rows, num_classes, first_maximum, behind_maxima, columns, BLOCK=1024, num_warps=4
    )


@triton.jit
def largest_places(quantization, rows, tile):
    return quantization.largest + rows.to(tl.int64) * quantization.stride + tile


@triton.jit
def quantize(z, largest, steps):
    """`largest` (n,) of the rows of z; where all of a row are -inf any finite number."""
    q = tl.maximum((z - largest[:, None]) * steps + LARGEST_Q, 0.0)
    return (q + ROUND).to(tl.int32, bitcast=True).to(tl.int16)


@triton.jit
def dequantize(q, largest, steps):
    q = q.to(tl.int32) & 0xFFFF
    z = largest[:, None] + (q.to(tl.float32) - LARGEST_Q) * (1.0 / steps)
    return tl.where(q > 0, z, float("-inf"))
