"""grad_input of a chunk of tokens: E @ linear_weight in float32, rounded once.

                V                    D
        ┌───────────────┐        ┌───────┐
      n │       E       │  @   V │   W   │     grad_input_i = c_i (E @ W)_i + residual_i W_(column_i)
        └───────────────┘        └───────┘

residual_i is what rounding took from the target's entry of E (finish_rows.py).

The (n, D) output has few tiles, and each tile runs long. If the tiles do not fill the multiprocessors evenly, V is
split into S ranges (split-K), whose products wait in float32 memory until they are added. With S = 1, the GEMM's
epilogue writes grad_input and needs no such memory. For example, 1408 tokens of 4096
features are 176 tiles, 1.33 waves of 132 programs; three splits make 528 tiles, 4 waves of a third of the length. The
device chooses the best S that the memory allows, since only the device knows how many tokens are valid.

S depends on the number of valid tokens, and so do the bits of the sum. With batch_invariant a token's bits must not
depend on other tokens. V is then split into ranges of RANGE classes, and their products are added in the order of the
ranges: by the kernel after the GEMM, or one after another in memory.

                                               H200, TFLOP/s at 1408x4096x128256: cuBLAS 665, S = 1 583, S = 3 764
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from ..kernel import Kernel, launches
from ..rows.valid_tokens import ValidTokens, valid_rows
from .tiles import (
    EVERY_BLOCK,
    ClassBlocks,
    Tiles,
    input_tiles_for,
    kernel_matrices,
    load_tile,
    matrix_of,
    multiprocessors,
    number_of_steps,
    step_at,
    store_tile,
)

# n tokens of a chunk, D hidden, V vocabulary, S splits of it

RANGE = 16384  # classes; 128256 classes are 8 ranges, and 512 x 4096 outputs then fill 132 programs evenly
RANGE_BYTES = 64 << 20  # of memory for products of ranges; if they need more, rows are processed in groups
MOST_SPLITS = tl.constexpr(16)
TILE_OVERHEAD = tl.constexpr(8)  # time to fill the pipeline and to store a tile, in main-loop steps


@triton.jit
def splits_of(
    count, D, depth, numbers, STEPS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The number S of splits that takes the fewest main-loop steps, if PROGRAMS tiles run at a time. The float32
    products of the splits must fit `numbers` numbers. With STEPS > 0, the number of ranges of so many steps.
    """
    if STEPS > 0:
        return tl.cdiv(depth, STEPS)
    else:
        tiles = tl.cdiv(count, BLOCK_M) * tl.cdiv(D, BLOCK_N)
        splits = 1 + tl.arange(0, MOST_SPLITS)
        waves = (tiles * splits + PROGRAMS - 1) // PROGRAMS
        steps = waves * ((depth + splits - 1) // splits + TILE_OVERHEAD)
        fits = (splits == 1) | (splits <= numbers // tl.maximum(count * D, 1))
        return 1 + tl.argmin(tl.where(fits, steps, 2147483647), 0)


def steps_and_splits(rows: int, hidden: int, depth: int, numbers: int, programs: int, tiles: Tiles) -> tuple[int, int]:
    """Returns the main-loop steps and S that the device chooses for this many tokens."""
    count = cdiv(rows, tiles.block_m) * cdiv(hidden, tiles.block_n)
    most = min(max(numbers // (rows * hidden), 1), MOST_SPLITS.value)
    return min(
        (cdiv(count * splits, programs) * (cdiv(depth, splits) + TILE_OVERHEAD.value), splits)
        for splits in range(1, most + 1)
    )


@functools.lru_cache(maxsize=1024)
def fastest_tiles(
    tiles: tuple[Tiles, ...], rows: int, hidden: int, vocab: int, numbers: int, programs: int
) -> tuple[float, int, Tiles]:
    """Returns the time, in main-loop steps of the first of `tiles`, S, and the tiles that take the least time."""

    def cost(some: Tiles) -> tuple[float, int]:
        steps, splits = steps_and_splits(rows, hidden, cdiv(vocab, some.block_k), numbers, programs, some)
        return some.step_time * steps, splits

    best = min(tiles, key=cost)
    return *cost(best), best


def ranges_of(num_classes: int) -> int:
    return cdiv(num_classes, RANGE)


def products_of_ranges(num_classes: int) -> int:
    """How many products of ranges wait in memory: none if there is one range, which the GEMM's epilogue finishes."""
    ranges = ranges_of(num_classes)
    return ranges if ranges > 1 else 0


def steps_of_range(tiles: Tiles) -> int:
    """The number of main-loop steps of a range."""
    return RANGE // tiles.block_k


def float32_memory(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat float32, from the first multiple of 16 bytes to the last.

    Empty if there is no such range.
    """
    numbers = tensor.view(-1)
    first = -numbers.storage_offset() % 8
    count = (numbers.shape[0] - first) // 8 * 8
    if count <= 0:
        return numbers.new_empty(0, dtype=torch.float32)
    return numbers[first : first + count].view(torch.float32)


SUMMED = tl.constexpr(32)  # at most one sum over columns for each of so many


class Finish(NamedTuple):
    """What turns the product E @ W into grad_input, (n,) each, and what else is made of it."""

    row_factor: Tensor | None = None  # c_i; None for 1
    column: Tensor | None = None  # int64, the target's class, -1 for none; given together with `residual`
    residual: Tensor | None = None
    sums: Tensor | None = None  # (n, D / SUMMED) out, input . grad_input over a tile's columns
    input: Tensor | None = None  # (N, D), given together with `sums`
    # Its strides, as numbers: Triton 3.6 compiles no tuple within a tuple that holds None or 1.
    between_tokens: int = 0
    between_features: int = 0

    def of(self, rows: slice) -> "Finish":
        of_rows = "row_factor", "column", "residual", "sums"
        found = {name: getattr(self, name) for name in of_rows}
        return self._replace(**{name: vector[rows] for name, vector in found.items() if vector is not None})


@triton.jit
def finished_tile(
    product,  # (BLOCK_M, BLOCK_N) of E @ W
    rows,
    cols,
    row_mask,
    col_mask,
    finish,  # Finish
    linear_weight,  # (V, D)
    valid_tokens,  # ValidTokens
    D,
):
    if finish.row_factor is not None:
        product *= tl.load(finish.row_factor + rows, mask=row_mask, other=0.0)[:, None]
    if finish.column is not None:
        column = tl.load(finish.column + rows, mask=row_mask, other=-1)
        residual = tl.where(column >= 0, tl.load(finish.residual + rows, mask=row_mask, other=0.0), 0.0)
        there = row_mask & (column >= 0)
        weight = load_tile(linear_weight, column, cols, there, col_mask)
        product += residual[:, None] * weight.to(tl.float32)
    if finish.sums is not None:
        token = tl.load(valid_tokens.order + rows, mask=row_mask, other=0)
        of_tokens = finish.input + token.to(tl.int64)[:, None] * finish.between_tokens
        places = of_tokens + cols.to(tl.int64)[None, :] * finish.between_features
        input = tl.load(places, mask=row_mask[:, None] & col_mask[None, :], other=0.0)
        place = rows.to(tl.int64) * tl.cdiv(D, SUMMED) + tl.min(cols, 0) // SUMMED
        tl.store(finish.sums + place, tl.sum(product * input.to(tl.float32), 1), mask=row_mask)
    return product


@Kernel
def input_gradient_kernel(
    exponentials,  # (n, v): tensor descriptor with USE_TMA, else a Matrix
    classes,  # (V, D): the same kinds; linear_weight
    linear_weight,  # (V, D), read by pointers
    product_ptr,  # (S, count, D) float32: written, or added to
    out,  # (n, D) out
    finish,  # Finish
    valid_tokens,  # ValidTokens
    blocks,  # ClassBlocks
    n,
    D,
    V,
    numbers,  # how many float32 numbers `product` holds
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # features
    BLOCK_K: tl.constexpr,  # classes
    PROGRAMS: tl.constexpr,
    STEPS: tl.constexpr,  # main-loop steps of a range, if V is split into ranges; else 0
):
    count = valid_rows(valid_tokens, n)
    row_blocks = tl.cdiv(count, BLOCK_M)
    tiles = row_blocks * tl.cdiv(D, BLOCK_N)
    depth = tl.cdiv(V, BLOCK_K)
    splits = splits_of(count, D, depth, numbers, STEPS, PROGRAMS, BLOCK_M, BLOCK_N)
    for item in tl.range(tl.program_id(0), tiles * splits, PROGRAMS):
        split = item // tiles
        tile = item % tiles
        row_start = (tile % row_blocks) * BLOCK_M
        col_start = (tile // row_blocks) * BLOCK_N
        rows = row_start + tl.arange(0, BLOCK_M)
        cols = col_start + tl.arange(0, BLOCK_N)
        row_mask = rows < count
        col_mask = cols < D
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total = number_of_steps(blocks, depth, BLOCK_K)
        if STEPS > 0:
            steps = STEPS
        else:
            steps = tl.cdiv(total, splits)
        step = step_at(blocks, min(split * steps, total), BLOCK_K)
        for k in range(split * steps, min(split * steps + steps, total)):
            if blocks.number is None:
                step = k
            if USE_TMA:
                a = exponentials.load([row_start, step * BLOCK_K])
                b = classes.load([step * BLOCK_K, col_start])
            else:
                ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_tile(exponentials, rows, ks, row_mask, ks < V)
                b = load_tile(classes, ks, cols, ks < V, col_mask)
            acc = tl.dot(a, b, acc)
            if blocks.number is not None:
                step = step_at(blocks, k + 1, BLOCK_K)
        if splits == 1:
            grad = finished_tile(acc, rows, cols, row_mask, col_mask, finish, linear_weight, valid_tokens, D)
            store_tile(out, grad, rows, cols, row_mask, col_mask)
        else:
            mask = row_mask[:, None] & col_mask[None, :]
            product = product_ptr + (split.to(tl.int64) * count + rows)[:, None] * D + cols[None, :]
            tl.store(product, acc, mask=mask)


@Kernel
def finish_product_kernel(
    product_ptr,  # (S, count, D) float32
    linear_weight,  # (V, D)
    out,  # (n, D) out
    finish,  # Finish
    valid_tokens,  # ValidTokens
    n,
    D,
    numbers,
    depth,
    BLOCK_M: tl.constexpr,  # these three describe the GEMM's tiles
    BLOCK_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds the splits and finishes the sum."""
    count = valid_rows(valid_tokens, n)
    splits = splits_of(count, D, depth, numbers, STEPS, PROGRAMS, BLOCK_M, BLOCK_N)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    col_mask = cols < D
    end = tl.where(splits == 1, 0, count)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        row_mask = rows < count
        mask = row_mask[:, None] & col_mask[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for split in range(splits):
            product = product_ptr + (split * count.to(tl.int64) + rows)[:, None] * D + cols[None, :]
            acc += tl.load(product, mask=mask, other=0.0)
        grad = finished_tile(acc, rows, cols, row_mask, col_mask, finish, linear_weight, valid_tokens, D)
        store_tile(out, grad, rows, cols, row_mask, col_mask)


def launch_input_gradient(
    out: Tensor,  # (n, D) rows of grad_input
    exponentials: Tensor,  # (n, V)
    linear_weight: Tensor,  # (V, D)
    finish: Finish,
    valid_tokens: ValidTokens,
    product: Tensor,  # flat float32 memory
    blocks: ClassBlocks = EVERY_BLOCK,
    by_ranges: bool = False,  # V is split into ranges, for batch_invariant
    choice: tuple[Tiles, ...] = (),
) -> None:
    (n, hidden), programs = out.shape, multiprocessors(out)
    whole_weight, of_out = matrix_of(linear_weight), matrix_of(out)
    numbers = min(product.shape[0], 2**31 - 1)
    choice = choice or input_tiles_for(linear_weight, blocks.number is not None)
    if by_ranges:  # a token's bits may depend on the tiles
        choice = choice[:1]
    if launches.only_compile and len(choice) > 1:  # the number of tokens decides which of these kernels runs
        for tiles in choice:
            of_rows = out, exponentials, linear_weight, finish, valid_tokens, product, blocks
            launch_input_gradient(*of_rows, by_ranges, (tiles,))
        return
    *_, tiles = fastest_tiles(choice, n, hidden, linear_weight.shape[0], numbers, programs)
    depth = cdiv(linear_weight.shape[0], tiles.block_k)
    steps = steps_of_range(tiles) if by_ranges else 0
    if by_ranges and depth > steps:
        assert product.shape[0] >= cdiv(depth, steps) * out.numel()
    tile_shapes = [tiles.block_m, tiles.block_k], [tiles.block_k, tiles.block_n]
    constants = {"PROGRAMS": programs, "STEPS": steps}
    input_gradient_kernel[(programs,)](
        *kernel_matrices([exponentials, linear_weight], tile_shapes, tiles.tma),
        whole_weight,
        product,
        of_out,
        finish,
        valid_tokens,
        blocks,
        n,
        hidden,
        exponentials.shape[1],
        numbers,
        USE_TMA=tiles.tma,
        **constants,
        **tiles.options,
    )
    if 0 < depth <= steps or (not steps and numbers < 2 * hidden):
        return  # with one split for any number of valid tokens, the GEMM has finished
    rows, columns = 8, 256
    # About 16 programs per multiprocessor. With one program for each block of 4096x4096, returning took 9 us when no
    # token is valid.
    row_programs = min(cdiv(n, rows), cdiv(16 * programs, cdiv(hidden, columns)))
    finish_product_kernel[(row_programs, cdiv(hidden, columns))](
        product,
        whole_weight,
        of_out,
        finish,
        valid_tokens,
        n,
        hidden,
        numbers,
        depth,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        **constants,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
