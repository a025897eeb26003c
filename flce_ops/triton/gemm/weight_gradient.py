"""grad_linear_weight = E.T @ (c input), one chunk of tokens at a time, rounded once at the end.

                n                    D
        ┌───────────────┐        ┌───────┐
      V │               │  @   n │       │     persistent programs walk the tiles of (V, D); n ends at the valid tokens
        │     E.T       │        │  c x  │
        └───────────────┘        └───────┘

Between chunks the sum stands in grad_linear_weight's own memory, as float16 with a scale. float16 has 11 significant
bits where bfloat16 has 8, so the error is that of the last rounding.

    first chunk     sum = products / scale      scale: a power of two for each row of a tile, one byte. It is 2^4 to
    a later one     sum += products / scale     2^6 times the row's largest number, so sums may grow to 2^19
    last chunk      out = sum scale + products  times that number
    only chunk      out = products

The host does not know how many tokens are valid. If there are several chunks, the first chunk is therefore launched
twice: as the first and as the only one. The device runs one of the two launches, and the other returns immediately.
Launches of later chunks return immediately if no tokens are left.

On GPUs with tensor maps, the L2 cache does the additions (TMA's atomic add): a tile leaves through shared memory, and
no program reads or waits for the stored sum. H200, 1408x4096x128256: 2.42 ms with additions in the L2, 2.58 if the
kernel reads and writes the stored tile, 2.27 for a first chunk, 2.41 by cuBLAS. If the products of a row of a tile
would overflow the sum, the row is marked instead of added, and a second launch adds it under a new scale. Without
tensor maps the kernel reads every stored tile, so each chunk chooses new scales and needs no room for growth. The room
costs bits in numbers below 2^-8 of the largest in their row of a tile: beside a feature 1000 times as large as the
others, the others have 9 or 10 bits.

If the user gives a buffer (main_grad), the gradient is added to the buffer: each tile is read, and the sum is stored in
the buffer's dtype, once for each range of tokens. Additions in the L2 took as long (H200, 8 x 2048x4096x128256 into
float32: 87.9 and 87.4 ms).

A later chunk skips rows whose products overflow their scale, and sets bit 0 of the scale's byte, the mark. They belong
to rare classes that are a target for the first time. They occur if a step has many small chunks, because the sums of
many chunks then have to stay in the range of one scale. overflow_rows_kernel runs after each later chunk. It returns
immediately if no row is marked. Otherwise:

    for LOOK blocks of classes at a time:        one read of their marks, for one block of features
        for a block of which a row is marked:    acc = E.T @ (c input),  sum scale + acc  under a new scale

So a program needs only a few reads to look for marks. A kernel that looked at every tile separately and ran its
epilogue took 270 us per chunk, half as long as the chunk's products (H200, 16384x2048x128256, chunks of 384 tokens).
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..kernel import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows
from .tiles import (
    EVERY_BLOCK,
    LIVE,
    ClassBlocks,
    Tiles,
    block_of_tile,
    columns_of_tile,
    kernel_matrices,
    load_tile,
    main_grad_tiles_for,
    multiprocessors,
    number_of_steps,
    step_at,
    weight_tiles_for,
)

# n tokens of a chunk, D hidden, V vocabulary

# A scale is at most 2^ROOM times the largest number of its row, so later sums have room to grow. With more room, small
# numbers lose bits. With less room, a row overflows its scale more often if its class first becomes a target in a later
# chunk.
ROOM = tl.constexpr(6)
# The room if each chunk chooses new scales. The largest number of a row is then below 2^15 times its scale, and every
# number above 2^-27 of the largest keeps 11 bits.
NO_ROOM = tl.constexpr(-13)
WIDEST_STORE = tl.constexpr(128)  # columns of a tile that are stored at a time
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


@triton.jit
def times(products, factor_ptr):
    if factor_ptr is not None:
        products *= tl.load(factor_ptr)
    return products


LOOK = 16  # blocks of classes whose marks are read at once


@Kernel
def overflow_rows_kernel(
    exponentials_map,  # (n, V)
    rows_map,  # (n, D), c input
    sum_ptr,  # (V, D) float16
    exponent_ptr,  # (blocks of features, V) uint8 exponents of the scales; bit 0 marks a row
    guard_ptr,  # () int32, nonzero if any row is marked
    factor_ptr,  # () float32 of the products; None for 1
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
                    acc = times(acc, factor_ptr)
                    places = sum_ptr + classes.to(tl.int64)[:, None] * stride_sum_v + features[None, :]
                    of_sum = mask & (features < D)[None, :]
                    acc += power_of_two(scales & -2) * tl.load(places, mask=of_sum, other=0.0).to(tl.float32)
                    exponent = exponent_of(largest_of_rows(acc), ROOM)[:, None]
                    tl.store(unit_places, exponent.to(tl.uint8), mask=mask)
                    tl.store(places, (acc * power_of_two(254 - exponent)).to(sum_ptr.dtype.element_ty), mask=of_sum)


def launch_overflow_rows(
    total: Sum,  # the sum to which the marked rows are added
    matrices: list,  # tensor maps of (n, V) exponentials and of rows
    rows: Tensor,  # (n, D)
    valid_tokens: ValidTokens,
    *,
    factor: Tensor | None,  # ()
    blocks: ClassBlocks,
    tiles: Tiles,
) -> None:
    (n, hidden), num_classes = rows.shape, total.numbers.shape[0]
    feature_blocks = cdiv(hidden, tiles.block_n)
    stride = min(max(multiprocessors(rows) // feature_blocks, 1), cdiv(num_classes, tiles.block_m))
    strides = total.numbers.stride(0), total.exponents.stride(0)
    of_sum = *total, factor, valid_tokens, blocks, n, hidden, num_classes, *strides
    overflow_rows_kernel[(feature_blocks * stride,)](*matrices, *of_sum, LOOK=LOOK, **tiles.options)


@Kernel
def weight_gradient_kernel(
    exponentials,  # (n, V): tensor descriptor with USE_TMA, else a Matrix
    rows,  # (n, D): likewise, c input
    map_ptr,  # (V, D): tensor map of the sum, for the last chunk of the result; None if pointers store the tile
    stored_ptr,  # (V, D): the sum's tensor map, for the last chunk only
    sum_ptr,  # (V, D) float16; float32 if the result is float32
    result_ptr,  # (V, D) out, in the memory of the sum
    exponent_ptr,  # (blocks of features, V) uint8 exponents of the scales; bit 0 marks an overflowed row
    guard_ptr,  # () int32, nonzero if any row is marked
    factor_ptr,  # () float32 of the products; None for 1
    valid_tokens,  # ValidTokens
    blocks,  # ClassBlocks
    n,
    D,
    V,
    room,  # the largest product of one chunk, in units of the scale
    first_rows,  # rows of the first chunk; if they hold all valid tokens, it is the only chunk
    stride_out_v,
    stride_exponent,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    # adds to the result; FIRST and LAST are then set as well, because every chunk stores the result's dtype
    ADDS: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,  # classes
    BLOCK_N: tl.constexpr,  # features
    BLOCK_K: tl.constexpr,  # tokens
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    MEMORY_ADDS: tl.constexpr = USE_TMA and not (FIRST or LAST)
    PART_N: tl.constexpr = min(BLOCK_N, WIDEST_STORE)
    SCALE_ROOM: tl.constexpr = ROOM if USE_TMA else NO_ROOM
    SUM_TYPE: tl.constexpr = sum_ptr.dtype.element_ty
    RESULT_TYPE: tl.constexpr = result_ptr.dtype.element_ty
    count = valid_rows(valid_tokens, n)
    class_blocks = number_of_steps(blocks, tl.cdiv(V, BLOCK_M), BLOCK_M)
    feature_blocks = tl.cdiv(D, BLOCK_N)
    depth = tl.cdiv(count, BLOCK_K)
    tiles = class_blocks * feature_blocks
    if not ADDS:
        only = tl.load(valid_tokens.total) <= first_rows
        if FIRST and LAST:
            tiles = tl.where(only, tiles, 0)
        else:
            tiles = tl.where(only, 0, tiles)
    if ADDS or not (FIRST or LAST):
        tiles = tl.where(count > 0, tiles, 0)
    if FIRST and not LAST:
        if tl.program_id(0) == 0:
            tl.store(guard_ptr, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=USE_TMA):
        class_block, feature_block = block_of_tile(tile, class_blocks, feature_blocks, GROUP)
        class_start = step_at(blocks, class_block, BLOCK_M) * BLOCK_M
        feature_start = feature_block * BLOCK_N
        classes = class_start + tl.arange(0, BLOCK_M)
        features = feature_start + tl.arange(0, BLOCK_N)
        class_mask = classes < V
        if not (FIRST and LAST):
            exponent_places = exponent_ptr + feature_block.to(tl.int64) * stride_exponent + classes

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(depth):
            if USE_TMA:
                a = exponentials.load([k * BLOCK_K, class_start])
                b = rows.load([k * BLOCK_K, feature_start])
            else:
                ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_tile(exponentials, ks, classes, ks < count, class_mask)
                b = load_tile(rows, ks, features, ks < count, features < D)
            acc = tl.dot(a.T, b, acc)
        acc = times(acc, factor_ptr)

        if MEMORY_ADDS:
            acc = scaled_products(acc, exponent_places[:, None], class_mask[:, None], guard_ptr, room)
        elif not FIRST:
            exponent = tl.load(exponent_places[:, None], mask=class_mask[:, None], other=126).to(tl.int32) & -2
            scale = power_of_two(exponent)
            if not USE_TMA:
                places = classes.to(tl.int64)[:, None] * stride_out_v + features[None, :]
                mask = class_mask[:, None] & (features < D)[None, :]
                acc += scale * tl.load(sum_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if not (LAST or MEMORY_ADDS):
            exponent = exponent_of(largest_of_rows(acc), SCALE_ROOM)
            tl.store(exponent_places, exponent.to(tl.uint8), mask=class_mask)
            acc *= power_of_two(254 - exponent)[:, None]
        # stored in parts: a smaller staging buffer leaves shared memory for one more stage of the main loop
        for piece in tl.static_range(BLOCK_N // PART_N):
            part = columns_of_tile(acc, piece, PART_N)
            part_start = feature_start + piece * PART_N
            part_features = part_start + tl.arange(0, PART_N)
            places = classes.to(tl.int64)[:, None] * stride_out_v + part_features[None, :]
            mask = class_mask[:, None] & (part_features < D)[None, :]
            if ADDS:
                part += tl.load(result_ptr + places, mask=mask, other=0.0).to(tl.float32)
            elif LAST and not FIRST and USE_TMA:
                part += scale * stored_ptr.load([class_start, part_start]).to(tl.float32)
            part = part.to(RESULT_TYPE if LAST else SUM_TYPE)
            if MEMORY_ADDS:
                # each number gets one addend a chunk, so the order of tiles does not matter
                map_ptr.atomic_add([class_start, part_start], part)
            elif USE_TMA and not ADDS:
                map_ptr.store([class_start, part_start], part)
            else:
                tl.store((result_ptr if LAST else sum_ptr) + places, part, mask=mask)


@dataclass(eq=False)
class WeightGradient:
    """grad_linear_weight of a step of one or several chunks."""

    out: Tensor  # (V, D)
    tokens: int  # of all chunks
    chunks: int  # the most chunks that the tokens take; 1 with `adds`
    adds: bool = False  # the gradient is added to what `out` holds
    factor: Tensor | None = None  # () float32, of the products
    blocks: ClassBlocks = EVERY_BLOCK

    def __post_init__(self) -> None:
        out, self.room = self.out, LARGEST_SUM // self.chunks
        self.sum, self.first_rows = Sum(out.view(torch.float16) if out.itemsize == 2 else out), 0
        if self.chunks > 1:
            num_classes, feature_blocks = out.shape[0], cdiv(out.shape[1], weight_tiles_for(out).block_n)
            exponents = out.new_empty(feature_blocks, num_classes, dtype=torch.uint8)
            self.sum = Sum(self.sum.numbers, exponents, out.new_empty((), dtype=torch.int32))

    @functools.cached_property
    def tiles(self) -> Tiles:
        """First read in `add`, because a sparse step sets `blocks` after this object is made."""
        some_classes = self.blocks.number is not None
        return main_grad_tiles_for(self.out) if self.adds else weight_tiles_for(self.out, some_classes=some_classes)

    def add(
        self,
        exponentials: Tensor,  # (n, V)
        rows: Tensor,  # (n, D) c input, with zeros after the valid rows
        valid_tokens: ValidTokens,
    ) -> None:
        first = self.adds or valid_tokens.start == 0
        last = self.adds or valid_tokens.start + exponentials.shape[0] == self.tokens
        if first:
            self.first_rows = rows.shape[0]
        blocks = [self.tiles.block_k, self.tiles.block_m], [self.tiles.block_k, self.tiles.block_n]
        added = kernel_matrices([exponentials, rows], blocks, self.tiles.tma), rows, valid_tokens
        if first and not last:
            self.launch(*added, True, True)
        self.launch(*added, first, last)
        if self.tiles.tma and not (first or last):
            launch_overflow_rows(self.sum, *added, factor=self.factor, blocks=self.blocks, tiles=self.tiles)

    @functools.cached_property
    def maps(self) -> list:
        """Tensor maps of the sum and of the result, where there are any."""
        if not self.tiles.tma or self.adds:
            return [None, None]
        part = [self.tiles.block_m, min(self.tiles.block_n, WIDEST_STORE.value)]
        return kernel_matrices([self.sum.numbers if self.chunks > 1 else None, self.out], [part, part])

    def launch(self, matrices: list, rows: Tensor, valid_tokens: ValidTokens, first: bool, last: bool) -> None:
        out, total, tiles = self.out, self.sum, self.tiles
        (n, hidden), num_classes = rows.shape, out.shape[0]
        of_sum, of_result = self.maps
        if first and last:
            total = Sum(total.numbers)
        grid_tiles = cdiv(num_classes, tiles.block_m) * cdiv(hidden, tiles.block_n)
        programs, options = multiprocessors(rows), tiles.options
        if last and not first and tiles.block_m > 128:  # the stored tile takes the shared memory of a stage
            options = options | {"num_stages": tiles.num_stages - 1}
        weight_gradient_kernel[(min(grid_tiles, programs),)](
            *matrices,
            of_result if last else of_sum,
            of_sum if last and not first else None,
            total.numbers,
            out,
            *total[1:],
            self.factor,
            valid_tokens,
            self.blocks,
            n,
            hidden,
            num_classes,
            self.room,
            self.first_rows,
            out.stride(0),
            0 if total.exponents is None else total.exponents.stride(0),
            FIRST=first,
            LAST=last,
            ADDS=self.adds,
            USE_TMA=tiles.tma,
            GROUP=tiles.group,
            PROGRAMS=programs,
            **options,
        )


def sum_bytes(num_classes: int, hidden: int, tiles: Tiles) -> int:
    """Bytes of memory that a sum over several chunks needs beside grad_linear_weight: one byte for each scale."""
    return cdiv(hidden, tiles.block_n) * num_classes
