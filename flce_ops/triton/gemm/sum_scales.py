"""How the sum of grad_linear_weight is stored between chunks: as float16, with a scale for each row of a tile
(weight_gradient.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# A scale is at most 2^ROOM times the largest number of its row, so later sums have room to grow. With more room, small
# numbers lose bits. With less room, a row overflows its scale more often if its class first becomes a target in a later
# chunk.
ROOM = tl.constexpr(6)
# The room if each chunk chooses new scales. The largest number of a row is then below 2^15 times its scale, and every
# number above 2^-27 of the largest keeps 11 bits.
NO_ROOM = tl.constexpr(-13)
LARGEST_SUM = 2**15  # half of float16's largest number, in units of the scale


class Sum(NamedTuple):
    """The sum of grad_linear_weight between chunks."""

    numbers: Tensor  # (V, D) float16; float32 if the result is float32
    # (blocks of features, V) uint8 exponents of the scales; bit 0 marks an overflowed row
    exponents: Tensor | None = None
    guard: Tensor | None = None  # () int32, nonzero if any row is marked


@triton.jit
def largest_of_rows(tile):
    """The largest finite number of each row: nan and inf are the same under any scale."""
    tile = tl.abs(tile)
    return tl.max(tl.where(tile < float("inf"), tile, 0.0), 1)


@triton.jit
def exponent_of(largest, room: tl.constexpr):
    """The biased float32 exponent of the scale: even, and such that the scale and its inverse are normal numbers."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) + room
    return tl.minimum(tl.maximum(exponent, 28), 250) & -2


@triton.jit
def power_of_two(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_products(products, exponent_ptr, mask, guard_ptr, room):
    """The products of a later chunk, divided by the scales of their rows. If a product exceeds `room`, its whole row
    becomes 0 and is marked.
    """
    exponent = tl.load(exponent_ptr, mask=mask, other=126).to(tl.int32) & -2
    products *= power_of_two(254 - exponent)
    exceeds = tl.expand_dims(tl.max(tl.abs(products), 1) > room, 1)
    tl.store(exponent_ptr, (exponent + 1).to(tl.uint8), mask=mask & exceeds)
    tl.atomic_max(guard_ptr + tl.zeros_like(exponent), 1, mask=exceeds)
    return tl.where(exceeds, 0.0, products)
