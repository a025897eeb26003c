"""How the sum of grad_linear_weight is stored between chunks: as float16, with a scale for each row of a tile
(weight_gradient.py). Rows whose products overflow their scale are made again and added under a new scale.

A later chunk skips such rows and sets bit 0 of their scale's byte, the mark. Such rows belong to rare classes that are
a target for the first time. They occur if a step has many small chunks, because the sums of many chunks then have to
stay in the range of one scale. The kernel below runs after each later chunk. It returns immediately if no row is
marked. Otherwise:

    for LOOK blocks of classes at a time:        one read of their marks, for one block of features
        for a block of which a row is marked:    acc = E.T @ (c input),  sum scale + acc  under a new scale

So a program needs only a few reads to look for marks. A kernel that looked at every tile separately and ran its
epilogue took 270 us per chunk, half as long as the chunk's products (H200, 16384x2048x128256, chunks of 384 tokens).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows
from .tiles import LIVE, ClassBlocks, Tiles, multiprocessors, number_of_steps
from .tma import kernel_matrices

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


LOOK = 16  # blocks of classes whose marks are read at once


@Kernel
def overflow_rows_kernel(
    exponentials_map,  # (n, V)
    rows_map,  # (n, D), c input
    sum_ptr,  # (V, D) float16
    exponent_ptr,  # (blocks of features, V) uint8 exponents of the scales; bit 0 marks a row
    guard_ptr,  # () int32, nonzero if any row is marked
    valid_tokens,  # ValidTokens
    blocks,  # ClassBlocks
    n,
    D,
    V,
    stride_sum_v,
    stride_exponent,
    LOOK: tl.constexpr,
    BLOCK_M: tl.constexpr,  # classes
    BLOCK_N: tl.constexpr,  # features
    BLOCK_K: tl.constexpr,  # tokens
):
    """A program has one block of features, and every `stride`-th block of classes."""
    SPLIT: tl.constexpr = LIVE // BLOCK_M
    feature_blocks = tl.cdiv(D, BLOCK_N)
    feature_block = tl.program_id(0) % feature_blocks
    stride = tl.num_programs(0) // feature_blocks
    class_blocks = number_of_steps(blocks, tl.cdiv(V, BLOCK_M), BLOCK_M)
    end = tl.where(tl.load(guard_ptr) > 0, class_blocks, 0)
    depth = tl.cdiv(valid_rows(valid_tokens, n), BLOCK_K)
    exponent_ptr += feature_block.to(tl.int64) * stride_exponent
    features = feature_block * BLOCK_N + tl.arange(0, BLOCK_N)
    for first in range(tl.program_id(0) // feature_blocks, end, LOOK * stride):
        block = first + tl.arange(0, LOOK) * stride
        inside = block < end
        if blocks.number is not None:
            block = tl.load(blocks.which + block // SPLIT, mask=inside, other=0) * SPLIT + block % SPLIT
        every = (block * BLOCK_M)[:, None] + tl.arange(0, BLOCK_M)[None, :]
        marks = tl.load(exponent_ptr + every, mask=inside[:, None] & (every < V), other=0).to(tl.int32) & 1
        marked = tl.max(marks, 1)
        if tl.max(marked, 0) > 0:
            for j in range(LOOK):
                chosen = tl.arange(0, LOOK) == j
                if tl.max(tl.where(chosen, marked, 0), 0) > 0:
                    class_start = tl.max(tl.where(chosen, block, 0), 0) * BLOCK_M
                    classes = class_start + tl.arange(0, BLOCK_M)
                    unit_places = (exponent_ptr + classes)[:, None]
                    scales = tl.load(unit_places, mask=(classes < V)[:, None], other=0).to(tl.int32)
                    mask = (scales & 1) > 0
                    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                    for k in range(depth):
                        a = exponentials_map.load([k * BLOCK_K, class_start])
                        b = rows_map.load([k * BLOCK_K, feature_block * BLOCK_N])
                        acc = tl.dot(a.T, b, acc)
                    places = sum_ptr + classes.to(tl.int64)[:, None] * stride_sum_v + features[None, :]
                    of_sum = mask & (features < D)[None, :]
                    acc += power_of_two(scales & -2) * tl.load(places, mask=of_sum, other=0.0).to(tl.float32)
                    exponent = exponent_of(largest_of_rows(acc), ROOM)[:, None]
                    tl.store(unit_places, exponent.to(tl.uint8), mask=mask)
                    tl.store(places, (acc * power_of_two(254 - exponent)).to(sum_ptr.dtype.element_ty), mask=of_sum)


def launch_overflow_rows(
    total: Sum,  # the sum to which the marked rows are added
    exponentials: Tensor,  # (n, V)
    rows: Tensor,  # (n, D)
    valid_tokens: ValidTokens,
    *,
    blocks: ClassBlocks,
    tiles: Tiles,
) -> None:
    (n, num_classes), hidden = exponentials.shape, rows.shape[1]
    feature_blocks = cdiv(hidden, tiles.block_n)
    stride = min(max(multiprocessors(rows) // feature_blocks, 1), cdiv(num_classes, tiles.block_m))
    tile_shapes = ([tiles.block_k, tiles.block_m], [tiles.block_k, tiles.block_n])
    of_sum = *total, valid_tokens, blocks, n, hidden, num_classes, total.numbers.stride(0), total.exponents.stride(0)
    matrices = kernel_matrices([exponentials, rows], tile_shapes)
    overflow_rows_kernel[(feature_blocks * stride,)](*matrices, *of_sum, LOOK=LOOK, **tiles.options)
