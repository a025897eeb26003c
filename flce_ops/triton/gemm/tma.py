"""Matrices as the GEMMs take them: by tensor maps (TMA) where all of them allow it, else tiles of them by pointers.

And the order of a GEMM's tiles, and matrices of rank 1 that are added to a tile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

Outer = tuple[Tensor | None, Tensor | None]  # vectors whose outer product is added; None for 1, None for none
NO_OUTER: Outer = (None, None)


class Matrix(NamedTuple):
    """One that a kernel reads or writes by pointers; one argument."""

    pointer: Tensor
    stride: int  # between rows
    stride_col: int | None = None  # None for contiguous rows


def matrix_of(tensor: Tensor | None) -> Matrix | None:
    if tensor is None:
        return None
    stride, unit = tensor.stride()
    return Matrix(tensor, stride, None if unit == 1 else unit)


@triton.jit
def load_tile(matrix, rows, cols, row_mask, col_mask):
    places = matrix.pointer + rows.to(tl.int64)[:, None] * matrix.stride
    if matrix.stride_col is None:
        places += cols[None, :]
    else:
        places += cols.to(tl.int64)[None, :] * matrix.stride_col
    return tl.load(places, mask=row_mask[:, None] & col_mask[None, :], other=0.0)


@triton.jit
def store_tile(matrix, values, rows, cols, row_mask, col_mask):
    """Rounded; the rows are contiguous."""
    tl.static_assert(matrix.stride_col is None)
    places = matrix.pointer + rows.to(tl.int64)[:, None] * matrix.stride + cols[None, :]
    tl.store(places, values.to(matrix.pointer.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


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
