"""What the sum of grad_linear_weight between chunks is stored in: a scale for each row of a tile
(weight_gradient.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# A scale is at most 2^ROOM times the largest number of its row. With more room small numbers lose bits; with less,
# classes that are a target in a later chunk first overflow their scale more often.
ROOM = tl.constexpr(6)
# Where each chunk chooses anew: the largest is below 2^15, whatever is above 2^-27 of it has 11 bits.
NO_ROOM = tl.constexpr(-13)
LARGEST_SUM = 2**15  # times the scale: half of float16's largest number


class Sum(NamedTuple):
    """grad_linear_weight, or some of its classes, between chunks."""

    numbers: Tensor  # (V, D) float16, for float32 results float32
    exponents: Tensor | None = None  # (features' blocks, V) uint8, of the scales; and 1 where a row of a tile is marked
    guard: Tensor | None = None  # () int32: whether any is

    def of(self, columns: slice) -> "Sum":
        exponents = None if self.exponents is None else self.exponents[:, columns]
        return Sum(self.numbers[columns], exponents, self.guard)


@triton.jit
def largest_of_rows(tile):
    """Of what is finite: nan and inf stand for themselves under any scale."""
    tile = tl.abs(tile)
    return tl.max(tl.where(tile < float("inf"), tile, 0.0), 1)


@triton.jit
def exponent_of(largest, room: tl.constexpr):
    """Of the scale: as float32 has it, even, and such that scales and their inverses are normal numbers."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) + room
    return tl.minimum(tl.maximum(exponent, 28), 250) & -2


@triton.jit
def power_of_two(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled_products(products, exponent_ptr, mask, guard_ptr, room, AXIS: tl.constexpr):
    """A later chunk's products, along AXIS of one scale; 0 and a mark for the classes where one exceeds `room` times
    its scale.
    """
    exponent = tl.load(exponent_ptr, mask=mask, other=126).to(tl.int32) & -2
    products *= power_of_two(254 - exponent)
    exceeds = tl.expand_dims(tl.max(tl.abs(products), AXIS) > room, AXIS)
    tl.store(exponent_ptr, (exponent + 1).to(tl.uint8), mask=mask & exceeds)
    tl.atomic_max(guard_ptr + tl.zeros_like(exponent), 1, mask=exceeds)
    return tl.where(exceeds, 0.0, products)
