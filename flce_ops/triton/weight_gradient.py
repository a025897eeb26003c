"""grad_linear_weight = E.T @ (c input), a chunk of tokens at a time, rounded once in the end.

                n                    D
        ┌───────────────┐        ┌───────┐
      V │               │  @   n │       │     persistent programs walk the tiles of (V, D); n ends at the kept tokens
        │     E.T       │        │  c x  │
        └───────────────┘        └───────┘

Between chunks the sum waits in grad_linear_weight's own 16 bits a number, as integers with one bfloat16 scale a class
and half tile:

    sum_vd = q_vd scale_v       scale_v = max_d |sum_vd| / 32767 or little more, of the half tile's columns

Rounding to them moves a number by 2^-16 of the largest of its half tile, 6e-5 of error after four chunks; rounding to
bfloat16 every time made it 2.4e-3 with one chunk, 3.4e-3 with three, 4.8e-3 with ten. The last chunk that holds tokens,
which the device finds, writes the gradient itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.gemm_operands import descriptors, fits_tma
from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.target import multiprocessors, weight_tiles_for

# n tokens of a chunk, D hidden, V vocabulary

NAN_AS_INTEGER = tl.constexpr(-32768.0)  # inf waits as nan too: its scale leaves nothing of the others


@triton.jit
def weight_gradient_kernel(
    exponentials_ptr,  # (n, V): tensor descriptor with USE_TMA, else a pointer
    rows_ptr,  # (n, D): likewise, c input
    low_ptr,  # (n, D): likewise, what rounding took from c input; or None
    out_ptr,  # (V, D): likewise, out
    sum_ptr,  # out as a pointer
    scale_ptr,  # (ceil(D / BLOCK_N), V) of the sums between chunks; None where one chunk is all
    class_factor_ptr,  # (V,) and (D,): their outer product is added by the first chunk; None for 1, None for none
    outer_ptr,
    kept,  # Kept
    n,
    D,
    V,
    stride_exponentials_n,
    stride_rows_n,
    stride_out_v,
    stride_scale,
    FIRST: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,  # classes
    BLOCK_N: tl.constexpr,  # features
    BLOCK_K: tl.constexpr,  # tokens
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    count = kept_rows(kept, n)
    goes_on = tl.load(kept.count) > kept.start + n  # tokens are left for later chunks
    class_blocks = tl.cdiv(V, BLOCK_M)
    feature_blocks = tl.cdiv(D, BLOCK_N)
    depth = tl.cdiv(count, BLOCK_K)
    tiles = class_blocks * feature_blocks
    if not FIRST:
        tiles = tl.where(count > 0, tiles, 0)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        group_tiles = GROUP * feature_blocks
        first = (tile // group_tiles) * GROUP
        height = min(class_blocks - first, GROUP)
        class_start = (first + tile % height) * BLOCK_M
        feature_block = (tile % group_tiles) // height
        feature_start = feature_block * BLOCK_N
        classes = class_start + tl.arange(0, BLOCK_M)
        features = feature_start + tl.arange(0, BLOCK_N)
        class_mask = classes < V

        if USE_TMA and not FIRST:
            prefetch_rows(sum_ptr, tl.minimum(classes, V - 1), feature_start, D, stride_out_v, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(depth):
            if USE_TMA:
                a = exponentials_ptr.load([k * BLOCK_K, class_start])
                b = rows_ptr.load([k * BLOCK_K, feature_start])
            else:
                ks = k * BLOCK_K + tl.arange(0, BLOCK_K)
                row_offsets = ks.to(tl.int64)[:, None] * stride_rows_n + features[None, :]
                b_mask = (ks < n)[:, None] & (features < D)[None, :]
                a = tl.load(
                    exponentials_ptr + ks.to(tl.int64)[:, None] * stride_exponentials_n + classes[None, :],
                    mask=(ks < n)[:, None] & class_mask[None, :],
                    other=0.0,
                )
                b = tl.load(rows_ptr + row_offsets, mask=b_mask, other=0.0)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
            if low_ptr is not None:
                if USE_TMA:
                    low = low_ptr.load([k * BLOCK_K, feature_start])
                else:
                    low = tl.load(low_ptr + row_offsets, mask=b_mask, other=0.0)
                acc = tl.dot(a.T, low, acc, input_precision=PRECISION)

        if FIRST:
            if outer_ptr is not None:
                outer = tl.load(outer_ptr + features, mask=features < D, other=0.0)[None, :]
                if class_factor_ptr is not None:
                    outer = outer * tl.load(class_factor_ptr + classes, mask=class_mask, other=0.0)[:, None]
                acc += outer
        # One half after the other: both at once would not fit the registers beside what was stored.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            add_and_store(
                left if half == 0 else right,
                out_ptr,
                scale_ptr,
                class_start,
                feature_start + half * (BLOCK_N // 2),
                2 * feature_block + half,
                goes_on,
                D,
                V,
                stride_out_v,
                stride_scale,
                FIRST,
                USE_TMA,
                BLOCK_M,
                BLOCK_N // 2,
            )


@triton.jit
def prefetch_rows(pointer, rows, col_start, D, stride, COLUMNS: tl.constexpr):
    """Half numbers of a tile on their way to the L2 while the main loop runs: the tile's end waits for them."""
    addresses = (pointer + rows.to(tl.int64) * stride + col_start).to(tl.int64)
    nbytes = tl.zeros_like(rows) + 2 * tl.minimum(D - col_start, COLUMNS)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses, nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_and_store(
    acc,  # (BLOCK_M, COLUMNS)
    out_ptr,
    scale_ptr,
    class_start,
    feature_start,
    block,  # of COLUMNS features
    goes_on,
    D,
    V,
    stride_out_v,
    stride_scale,
    FIRST: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sum over chunks so far: as integers and a scale, or, where it is complete, rounded."""
    classes = class_start + tl.arange(0, BLOCK_M)
    features = feature_start + tl.arange(0, COLUMNS)
    class_mask = classes < V
    mask = class_mask[:, None] & (features < D)[None, :]
    places = classes.to(tl.int64)[:, None] * stride_out_v + features[None, :]
    if USE_TMA:
        dtype: tl.constexpr = out_ptr.dtype
    else:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
    if not FIRST:
        if USE_TMA:
            stored = out_ptr.load([class_start, feature_start])
        else:
            stored = tl.load(out_ptr + places, mask=mask, other=0.0)
        if scale_ptr is None:
            acc += stored.to(tl.float32)
        else:
            scale = tl.load(scale_ptr + block * stride_scale + classes, mask=class_mask, other=0.0).to(tl.float32)
            waited = stored.to(tl.int16, bitcast=True).to(tl.float32)
            acc += tl.where(waited == NAN_AS_INTEGER, float("nan"), waited * scale[:, None])
    result = acc.to(dtype)
    if scale_ptr is not None:
        if goes_on:
            largest = tl.max(tl.abs(acc), 1)
            scale = (largest * (1.01 / 32767.0)).to(tl.bfloat16)  # rounded, it is no less than largest / 32767
            tl.store(scale_ptr + block * stride_scale + classes, scale, mask=class_mask)
            scale = scale.to(tl.float32)
            ratio = acc * tl.where(scale > 0.0, 1.0 / scale, 0.0)[:, None]
            ratio = tl.where(ratio < 0.0, ratio - 0.5, ratio + 0.5)
            result = tl.where(ratio == ratio, ratio, NAN_AS_INTEGER).to(tl.int16).to(dtype, bitcast=True)
    if USE_TMA:
        out_ptr.store([class_start, feature_start], result)
    else:
        tl.store(out_ptr + places, result, mask=mask)


def scale_bytes(num_classes: int, hidden: int) -> int:
    """What `WeightGradient` allocates for the sums between chunks."""
    return 2 * num_classes * triton.cdiv(hidden, SCALE_COLUMNS)


SCALE_COLUMNS = 128  # of half a tile on Hopper


class WeightGradient:
    """grad_linear_weight of a step of one chunk or of several."""

    def __init__(
        self,
        out: Tensor,  # (V, D)
        *,
        several: bool,  # chunks
        outer: tuple[Tensor | None, Tensor] | None = None,  # (V,), (D,): their outer product is added
    ) -> None:
        self.out, self.class_factor, self.outer = out, *(outer or (None, None))
        self.tiles = weight_tiles_for(out)
        self.scales = None
        if several and out.element_size() == 2:
            blocks = triton.cdiv(out.shape[1], self.tiles.block_n // 2)
            self.scales = torch.empty(blocks, out.shape[0], dtype=torch.bfloat16, device=out.device)

    def add(
        self,
        columns: slice,  # of the vocabulary
        exponentials: Tensor,  # (n, v)
        rows: Tensor,  # (n, D) c input, zeros behind the kept rows
        kept: Kept,
        *,
        first: bool,
        low: Tensor | None = None,  # (n, D)
    ) -> None:
        assert exponentials.stride(1) == rows.stride(1) == 1 and (low is None or low.stride() == rows.stride())
        out, tiles = self.out[columns], self.tiles
        (n, num_classes), hidden = exponentials.shape, rows.shape[1]
        assert not tiles.tma or fits_tma(exponentials) and fits_tma(rows)
        matrices = [exponentials, rows, low, out]
        if tiles.tma:
            of_rows = [tiles.block_k, tiles.block_n]
            blocks = [tiles.block_k, tiles.block_m], of_rows, of_rows, [tiles.block_m, tiles.block_n // 2]
            matrices = descriptors(matrices, blocks)
        grid_tiles = triton.cdiv(num_classes, tiles.block_m) * triton.cdiv(hidden, tiles.block_n)
        programs = min(grid_tiles, multiprocessors(rows))
        weight_gradient_kernel[(programs,)](
            *matrices,
            out,
            None if self.scales is None else self.scales[:, columns],
            None if self.class_factor is None else self.class_factor[columns],
            self.outer if first else None,
            kept,
            n,
            hidden,
            num_classes,
            exponentials.stride(0),
            rows.stride(0),
            out.stride(0),
            self.out.shape[0],
            FIRST=first,
            USE_TMA=tiles.tma,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            GROUP=tiles.group,
            PROGRAMS=programs,
            FLATTEN=tiles.flatten,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",  # half operands ignore it
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages - (low is not None),  # whose tiles take the shared memory of one
        )
