"""grad_linear_weight = E.T @ (c input), a chunk of tokens at a time, rounded once in the end.

                n                    D
        ┌───────────────┐        ┌───────┐
      V │               │  @   n │       │     persistent programs walk the tiles of (V, D); n ends at the kept tokens
        │     E.T       │        │  c x  │
        └───────────────┘        └───────┘

The sum over chunks stands in grad_linear_weight, rounded once a chunk, or in a float32 copy where that is small. Where
tensor maps are, the memory adds: a tile leaves through shared memory and nothing waits for what was there. H200,
1408x4096x128256: 2.42 ms so, 2.58 with the stored tile read, 2.27 for a first chunk, 2.41 by cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.gemm_operands import descriptors, fits_tma
from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.replay import Kernel
from flce_ops.triton.target import multiprocessors, weight_tiles_for

# n tokens of a chunk, D hidden, V vocabulary


@Kernel
@triton.jit
def weight_gradient_kernel(
    exponentials_ptr,  # (n, V): tensor descriptor with USE_TMA, else a pointer
    rows_ptr,  # (n, D): likewise, c input
    low_ptr,  # (n, D): likewise, what rounding took from c input; or None
    out_ptr,  # (V, D): likewise, out
    class_factor_ptr,  # (V,) and (D,): their outer product is added by the first chunk; None for 1, None for none
    outer_ptr,
    kept,  # Kept
    n,
    D,
    V,
    stride_exponentials_n,
    stride_rows_n,
    stride_out_v,
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
        if USE_TMA:
            # half the staging buffer in shared memory: room for one more stage of the main loop
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            for half in tl.static_range(2):
                part = (left if half == 0 else right).to(out_ptr.dtype)
                place = [class_start, feature_start + half * (BLOCK_N // 2)]
                if FIRST:
                    out_ptr.store(place, part)
                else:
                    out_ptr.atomic_add(place, part)  # one addend a number: the order of tiles does not matter
        else:
            mask = class_mask[:, None] & (features < D)[None, :]
            places = out_ptr + classes.to(tl.int64)[:, None] * stride_out_v + features[None, :]
            if not FIRST:
                acc += tl.load(places, mask=mask, other=0.0).to(tl.float32)
            tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=mask)


class WeightGradient:
    """grad_linear_weight of a step of one chunk or of several."""

    def __init__(
        self,
        out: Tensor,  # (V, D)
        *,
        in_float32: bool,  # the sum over chunks
        outer: tuple[Tensor | None, Tensor] | None = None,  # (V,), (D,): their outer product is added
    ) -> None:
        self.out = out
        self.class_factor, self.outer = outer or (None, None)
        self.sum = torch.empty_like(out, dtype=torch.float32) if in_float32 else out
        self.tiles = weight_tiles_for(out, in_float32=in_float32)

    def close(self) -> None:
        if self.sum is not self.out:
            self.out.copy_(self.sum)

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
        out, tiles = self.sum[columns], self.tiles
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
            None if self.class_factor is None else self.class_factor[columns],
            self.outer if first else None,
            kept,
            n,
            hidden,
            num_classes,
            exponentials.stride(0),
            rows.stride(0),
            out.stride(0),
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
