"""grad_input of a chunk of tokens: E @ linear_weight in float32, rounded once.

                V                    D
        ┌───────────────┐        ┌───────┐
      n │       E       │  @   V │   W   │     grad_input_i = c_i (E @ W)_i + residual_i W_(column_i)  (+ m_i wW)
        └───────────────┘        └───────┘

residual_i is what rounding took from the target's entry of E (finish_rows.py), m wW what smoothing.py adds.

V may be split into S parts whose products wait in float32 memory until they are added (parts.py). One part is finished
where it is made and needs no memory.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.gemm.gemm_operands import descriptors, fits_tma, load_tile, store_tile
from flce_ops.triton.gemm.parts import parts_of
from flce_ops.triton.gemm.target import input_tiles_for, multiprocessors
from flce_ops.triton.launch.replay import Kernel
from flce_ops.triton.rows.kept_tokens import Kept, kept_rows
from flce_ops.triton.sparse.live_tiles import EVERY_STEP, Steps, number_of_steps, step_at

# n tokens of a chunk, D hidden, V vocabulary, S parts of it

Pieces = list[tuple[slice, Tensor]]  # columns of the vocabulary, (n, columns) of E


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
    kept,  # Kept
    live,  # Steps
    n,
    D,
    v,
    numbers,  # of `product`
    depth_of_parts,  # steps of the longest piece's main loop: all pieces are cut into as many parts
    stride_exponentials_n,
    stride_weight_v,
    stride_weight_d,
    stride_out_n,
    WHOLE: tl.constexpr,  # the piece is all of V
    FIRST: tl.constexpr,  # of the pieces
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,  # tokens
    BLOCK_N: tl.constexpr,  # features
    BLOCK_K: tl.constexpr,  # classes
    PROGRAMS: tl.constexpr,
):
    count = kept_rows(kept, n)
    row_blocks = tl.cdiv(count, BLOCK_M)
    tiles = row_blocks * tl.cdiv(D, BLOCK_N)
    depth = tl.cdiv(v, BLOCK_K)
    parts = parts_of(count, D, depth_of_parts, numbers, PROGRAMS, BLOCK_M, BLOCK_N)
    for unit in tl.range(tl.program_id(0), tiles * parts, PROGRAMS):
        part = unit // tiles
        tile = unit % tiles
        row_start = (tile % row_blocks) * BLOCK_M
        col_start = (tile // row_blocks) * BLOCK_N
        rows = row_start + tl.arange(0, BLOCK_M)
        cols = col_start + tl.arange(0, BLOCK_N)
        row_mask = rows < count
        col_mask = cols < D
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total = number_of_steps(live, row_start, depth, BLOCK_K)
        steps = tl.cdiv(total, parts)
        step = step_at(live, row_start, min(part * steps, total), BLOCK_K)
        for k in range(part * steps, min(part * steps + steps, total)):
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
        if WHOLE and parts == 1:
            grad = finished_tile(
                acc, rows, cols, row_mask, col_mask, finish, weight_ptr, stride_weight_v, stride_weight_d
            )
            store_tile(out_ptr, grad, rows, cols, row_mask, col_mask, stride_out_n)
        else:
            mask = row_mask[:, None] & col_mask[None, :]
            product = product_ptr + (part.to(tl.int64) * count + rows)[:, None] * D + cols[None, :]
            if not FIRST:
                acc += tl.load(product, mask=mask, other=0.0)
            tl.store(product, acc, mask=mask)


@Kernel
def finish_product_kernel(
    product_ptr,  # (S, count, D) float32
    weight_ptr,  # (V, D)
    out_ptr,  # (n, D) out
    finish,  # Finish
    kept,  # Kept
    n,
    D,
    numbers,
    depth_of_parts,
    stride_weight_v,
    stride_weight_d,
    stride_out_n,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of the GEMM's tiles, as the next two
    BLOCK_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sum of the parts, finished."""
    count = kept_rows(kept, n)
    parts = parts_of(count, D, depth_of_parts, numbers, PROGRAMS, BLOCK_M, BLOCK_N)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    col_mask = cols < D
    end = count
    if WHOLE:
        end = tl.where(parts == 1, 0, count)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        row_mask = rows < count
        mask = row_mask[:, None] & col_mask[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for part in range(parts):
            product = product_ptr + (part * count.to(tl.int64) + rows)[:, None] * D + cols[None, :]
            acc += tl.load(product, mask=mask, other=0.0)
        grad = finished_tile(acc, rows, cols, row_mask, col_mask, finish, weight_ptr, stride_weight_v, stride_weight_d)
        store_tile(out_ptr, grad, rows, cols, row_mask, col_mask, stride_out_n)


class InputGradient:
    """grad_input of a chunk, from the pieces of its E one after another."""

    def __init__(
        self,
        out: Tensor,  # (n, D) rows of grad_input
        linear_weight: Tensor,  # (V, D)
        finish: Finish,
        kept: Kept,
        columns: list[slice],  # of the pieces
        product: Tensor,  # flat float32 memory; of several pieces it has to hold (n, D) numbers
        live: Steps = EVERY_STEP,  # of one piece
    ) -> None:
        assert out.stride(1) == 1 and (len(columns) == 1 or product.shape[0] >= out.numel())
        self.out, self.linear_weight, self.finish, self.kept, self.product = out, linear_weight, finish, kept, product
        self.live, self.programs = live, multiprocessors(out)
        self.tiles = input_tiles_for(linear_weight, live=live.number is not None)
        self.whole = len(columns) == 1
        self.depth = max(triton.cdiv(cols.stop - cols.start, self.tiles.block_k) for cols in columns)
        self.numbers = min(product.shape[0], 2**31 - 1)

    def add(self, columns: slice, piece: Tensor) -> None:  # (n, v)
        assert piece.stride(1) == 1
        tiles, classes = self.tiles, self.linear_weight[columns]
        matrices = [piece, classes]
        assert not tiles.tma or fits_tma(piece)
        if tiles.tma:
            matrices = descriptors(matrices, ([tiles.block_m, tiles.block_k], [tiles.block_k, tiles.block_n]))
        input_gradient_kernel[(self.programs,)](
            *matrices,
            self.linear_weight,
            self.product,
            self.out,
            self.finish,
            self.kept,
            self.live,
            *self.out.shape,
            classes.shape[0],
            self.numbers,
            self.depth,
            piece.stride(0),
            *classes.stride(),
            self.out.stride(0),
            WHOLE=self.whole,
            FIRST=columns.start == 0,
            USE_TMA=tiles.tma,
            PROGRAMS=self.programs,
            **tiles.options,
        )

    def close(self) -> None:
        n, hidden = self.out.shape
        if self.whole and self.numbers < 2 * hidden:
            return  # there is one part, whatever the count is
        rows, columns = 8, 256
        # some 16 programs a multiprocessor: one for each block of 4096x4096 took 9 us to leave where nothing is kept
        blocks = min(triton.cdiv(n, rows), triton.cdiv(16 * self.programs, triton.cdiv(hidden, columns)))
        finish_product_kernel[(blocks, triton.cdiv(hidden, columns))](
            self.product,
            self.linear_weight,
            self.out,
            self.finish,
            self.kept,
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
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )
