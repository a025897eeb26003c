"""grad_input of a chunk of tokens: E @ linear_weight in float32, rounded once.

                V                    D
        ┌───────────────┐        ┌───────┐
      n │       E       │  @   V │   W   │     grad_input_i = c_i (E @ W)_i + residual_i W_(column_i)  (+ m_i wW)
        └───────────────┘        └───────┘

residual_i is what rounding took from the target's entry of E (finish_rows.py), m wW what smoothing.py adds.

V may be split into S ranges whose products wait in float32 memory until they are added (split_k.py). One split is
finished where it is made and needs no memory.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..launch.replay import Kernel
from ..rows.valid_tokens import ValidTokens, valid_rows
from ..sparse.live_tiles import EVERY_STEP, Steps, number_of_steps, step_at
from .device import input_tiles_for, multiprocessors
from .split_k import splits_of, steps_of_range
from .tma import descriptors, fits_tma, load_tile, store_tile

# n tokens of a chunk, D hidden, V vocabulary, S splits of it

ClassSlices = list[tuple[slice, Tensor]]  # columns of the vocabulary, (n, columns) of E


class Finish(NamedTuple):
    """What makes grad_input of the product; (n,) each but the last."""

    row_factor: Tensor | None = None  # c_i; None for 1
    column: Tensor | None = None  # int64, the target's, -1 where there is none; with the next
    residual: Tensor | None = None
    outer_row: Tensor | None = None  # times the next: a matrix of rank 1 that is added
    outer_column: Tensor | None = None  # (D,)

    def of(self, rows: slice) -> "Finish":
        per_row = [None if vector is None else vector[rows] for vector in self[:-1]]
        return Finish._make([*per_row, self.outer_column])


@triton.jit
def finished_tile(
    product,  # (BLOCK_M, BLOCK_N) of E @ W
    rows,
    cols,
    row_mask,
    col_mask,
    finish,  # Finish
    weight_ptr,  # (V, D)
    stride_weight_v,
    stride_weight_d,
):
    if finish.row_factor is not None:
        product *= tl.load(finish.row_factor + rows, mask=row_mask, other=0.0)[:, None]
    if finish.column is not None:
        column = tl.load(finish.column + rows, mask=row_mask, other=-1)
        residual = tl.where(column >= 0, tl.load(finish.residual + rows, mask=row_mask, other=0.0), 0.0)
        there = row_mask & (column >= 0)
        weight = load_tile(weight_ptr, column, cols, there, col_mask, stride_weight_v, stride_weight_d)
        product += residual[:, None] * weight.to(tl.float32)
    if finish.outer_row is not None:
        outer = tl.load(finish.outer_row + rows, mask=row_mask, other=0.0)
        product += outer[:, None] * tl.load(finish.outer_column + cols, mask=col_mask, other=0.0)[None, :]
    return product


@Kernel
def input_gradient_kernel(
    exponentials_ptr,  # (n, v): tensor descriptor with USE_TMA, else a pointer
    classes_ptr,  # (v, D): likewise, rows of linear_weight
    weight_ptr,  # (V, D)
    product_ptr,  # (S, count, D) float32; out, or added to
    out_ptr,  # (n, D) out
    finish,  # Finish
    valid_tokens,  # ValidTokens
    live,  # Steps
    n,
    D,
    v,
    numbers,  # of `product`
    depth_of_splits,  # steps of the longest slice's main loop: all slices are split as often
    stride_exponentials_n,
    stride_weight_v,
    stride_weight_d,
    stride_out_n,
    WHOLE: tl.constexpr,  # the slice is all of V
    FIRST: tl.constexpr,  # of the slices
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # features
    BLOCK_K: tl.constexpr,  # classes
    PROGRAMS: tl.constexpr,
    STEPS: tl.constexpr,  # of a range, where V is split in these; else 0
):
    count = valid_rows(valid_tokens, n)
    row_blocks = tl.cdiv(count, BLOCK_M)
    tiles = row_blocks * tl.cdiv(D, BLOCK_N)
    depth = tl.cdiv(v, BLOCK_K)
    if STEPS > 0:
        splits = tl.cdiv(depth_of_splits, STEPS)
    else:
        splits = splits_of(count, D, depth_of_splits, numbers, PROGRAMS, BLOCK_M, BLOCK_N)
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
        total = number_of_steps(live, row_start, depth, BLOCK_K)
        if STEPS > 0:
            steps = STEPS
        else:
            steps = tl.cdiv(total, splits)
        step = step_at(live, row_start, min(split * steps, total), BLOCK_K)
        for k in range(split * steps, min(split * steps + steps, total)):
            if live.number is None:
                step = k
            if USE_TMA:
                a = exponentials_ptr.load([row_start, step * BLOCK_K])
                b = classes_ptr.load([step * BLOCK_K, col_start])
            else:
                ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_tile(exponentials_ptr, rows, ks, row_mask, ks < v, stride_exponentials_n)
                b = load_tile(classes_ptr, ks, cols, ks < v, col_mask, stride_weight_v, stride_weight_d)
            acc = tl.dot(a, b, acc)
            if live.number is not None:
                step = step_at(live, row_start, k + 1, BLOCK_K)
        if WHOLE and splits == 1:
            grad = finished_tile(
                acc, rows, cols, row_mask, col_mask, finish, weight_ptr, stride_weight_v, stride_weight_d
            )
            store_tile(out_ptr, grad, rows, cols, row_mask, col_mask, stride_out_n)
        else:
            mask = row_mask[:, None] & col_mask[None, :]
            product = product_ptr + (split.to(tl.int64) * count + rows)[:, None] * D + cols[None, :]
            if not FIRST:
                acc += tl.load(product, mask=mask, other=0.0)
            tl.store(product, acc, mask=mask)


@Kernel
def finish_product_kernel(
    product_ptr,  # (S, count, D) float32
    weight_ptr,  # (V, D)
    out_ptr,  # (n, D) out
    finish,  # Finish
    valid_tokens,  # ValidTokens
    n,
    D,
    numbers,
    depth_of_splits,
    stride_weight_v,
    stride_weight_d,
    stride_out_n,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of the GEMM's tiles, as the next two
    BLOCK_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sum of the splits, finished."""
    count = valid_rows(valid_tokens, n)
    if STEPS > 0:
        splits = tl.cdiv(depth_of_splits, STEPS)
    else:
        splits = splits_of(count, D, depth_of_splits, numbers, PROGRAMS, BLOCK_M, BLOCK_N)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    col_mask = cols < D
    end = count
    if WHOLE:
        end = tl.where(splits == 1, 0, count)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        row_mask = rows < count
        mask = row_mask[:, None] & col_mask[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for split in range(splits):
            product = product_ptr + (split * count.to(tl.int64) + rows)[:, None] * D + cols[None, :]
            acc += tl.load(product, mask=mask, other=0.0)
        grad = finished_tile(acc, rows, cols, row_mask, col_mask, finish, weight_ptr, stride_weight_v, stride_weight_d)
        store_tile(out_ptr, grad, rows, cols, row_mask, col_mask, stride_out_n)


class InputGradient:
    """grad_input of a chunk, from the slices of its E one after another."""

    def __init__(
        self,
        out: Tensor,  # (n, D) rows of grad_input
        linear_weight: Tensor,  # (V, D)
        finish: Finish,
        valid_tokens: ValidTokens,
        columns: list[slice],  # of the slices
        product: Tensor,  # flat float32 memory; of several slices it has to hold (n, D) numbers
        live: Steps = EVERY_STEP,  # of one slice
        *,
        by_ranges: bool = False,  # of V, whose products are added in their order: one slice, or each range is one
    ) -> None:
        assert out.stride(1) == 1 and (len(columns) == 1 or product.shape[0] >= out.numel())
        self.out, self.linear_weight, self.finish, self.valid_tokens, self.product = (
            out,
            linear_weight,
            finish,
            valid_tokens,
            product,
        )
        self.live, self.programs = live, multiprocessors(out)
        self.tiles = input_tiles_for(linear_weight, live=live.number is not None)
        self.whole = len(columns) == 1
        self.depth = max(triton.cdiv(cols.stop - cols.start, self.tiles.block_k) for cols in columns)
        self.numbers = min(product.shape[0], 2**31 - 1)
        self.steps = steps_of_range(self.tiles) if by_ranges else 0
        if by_ranges and self.whole and self.depth > self.steps:
            assert product.shape[0] >= triton.cdiv(self.depth, self.steps) * out.numel()

    def add(self, columns: slice, exponentials: Tensor) -> None:  # (n, v)
        assert exponentials.stride(1) == 1
        tiles, classes = self.tiles, self.linear_weight[columns]
        matrices = [exponentials, classes]
        assert not tiles.tma or fits_tma(exponentials)
        if tiles.tma:
            matrices = descriptors(matrices, ([tiles.block_m, tiles.block_k], [tiles.block_k, tiles.block_n]))
        input_gradient_kernel[(self.programs,)](
            *matrices,
            self.linear_weight,
            self.product,
            self.out,
            self.finish,
            self.valid_tokens,
            self.live,
            *self.out.shape,
            classes.shape[0],
            self.numbers,
            self.depth,
            exponentials.stride(0),
            *classes.stride(),
            self.out.stride(0),
            WHOLE=self.whole,
            FIRST=columns.start == 0,
            USE_TMA=tiles.tma,
            PROGRAMS=self.programs,
            STEPS=self.steps,
            **tiles.options,
        )

    def close(self) -> None:
        n, hidden = self.out.shape
        if self.whole and (0 < self.depth <= self.steps or (not self.steps and self.numbers < 2 * hidden)):
            return  # there is one split, whatever the count is
        rows, columns = 8, 256
        # some 16 programs a multiprocessor: one for each block of 4096x4096 took 9 us to leave where no token is valid
        blocks = min(triton.cdiv(n, rows), triton.cdiv(16 * self.programs, triton.cdiv(hidden, columns)))
        finish_product_kernel[(blocks, triton.cdiv(hidden, columns))](
            self.product,
            self.linear_weight,
            self.out,
            self.finish,
            self.valid_tokens,
            n,
            hidden,
            self.numbers,
            self.depth,
            *self.linear_weight.stride(),
            self.out.stride(0),
            WHOLE=self.whole,
            BLOCK_M=self.tiles.block_m,
            BLOCK_N=self.tiles.block_n,
            PROGRAMS=self.programs,
            STEPS=self.steps,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )
