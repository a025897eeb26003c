"""Matrices as the GEMMs take them: by tensor maps (TMA) where all of them allow it, else tiles of them by pointers.

And the order of a GEMM's tiles, and matrices of rank 1 that are added to a tile.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

Outer = tuple[Tensor | None, Tensor | None]  # vectors whose outer product is added; None for 1, None for none
NO_OUTER: Outer = (None, None)


@triton.jit
def load_tile(matrix_ptr, rows, cols, row_mask, col_mask, stride_row, stride_col=None):
    """By pointers; without `stride_col` columns are contiguous."""
    places = matrix_ptr + rows.to(tl.int64)[:, None] * stride_row
    if stride_col is None:
        places += cols[None, :]
    else:
        places += cols.to(tl.int64)[None, :] * stride_col
    return tl.load(places, mask=row_mask[:, None] & col_mask[None, :], other=0.0)


@triton.jit
def store_tile(matrix_ptr, values, rows, cols, row_mask, col_mask, stride_row):
    """By pointers, columns contiguous; rounded."""
    places = matrix_ptr + rows.to(tl.int64)[:, None] * stride_row + cols[None, :]
    tl.store(places, values.to(matrix_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def block_of_tile(tile, blocks, across, GROUP: tl.constexpr):
    """GROUP blocks sweep those across together: (which of `blocks`, which of `across`)."""
    group_tiles = GROUP * across
    first = (tile // group_tiles) * GROUP
    height = min(blocks - first, GROUP)
    return first + tile % height, (tile % group_tiles) // height


@triton.jit
def outer_product(outer, rows, cols, row_mask, col_mask):
    """Of two vectors, the first None for 1."""
    product = tl.load(outer[1] + cols, mask=col_mask, other=0.0)[None, :]
    if outer[0] is not None:
        product = product * tl.load(outer[0] + rows, mask=row_mask, other=0.0)[:, None]
    return product


def fits_tma(tensor: Tensor | None) -> bool:
    """Rows contiguous and apart, base and row stride multiples of 16 bytes: what a tensor map can address."""
    if tensor is None:
        return True
    stride, unit = tensor.stride()
    aligned = stride * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return unit == 1 and stride >= tensor.shape[1] and aligned


def descriptors(matrices: Sequence[Tensor | None], blocks: Sequence[list[int]]) -> list:
    """Tensor maps of the matrices in tiles of those sizes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        None if matrix is None else TensorDescriptor.from_tensor(matrix, block)
        for matrix, block in zip(matrices, blocks)
    ]
