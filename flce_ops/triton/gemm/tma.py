"""How GEMMs read matrices: by tensor maps (TMA) if all of them allow it, else by pointers.

Also the order of a GEMM's tiles.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Matrix(NamedTuple):
    """A matrix that a kernel reads or writes by pointers. Passed to kernels as one argument."""

    pointer: Tensor
    stride: int  # between rows
    stride_col: int | None = None  # between columns; None if rows are contiguous


def matrix_of(tensor: Tensor | None) -> Matrix | None:
    if tensor is None:
        return None
    stride, unit = tensor.stride()
    return Matrix(tensor, stride, None if unit == 1 else unit)


@triton.jit
def load_tile(matrix, rows, cols, row_mask, col_mask):
    """Loads by pointers."""
    places = matrix.pointer + rows.to(tl.int64)[:, None] * matrix.stride
    if matrix.stride_col is None:
        places += cols[None, :]
    else:
        places += cols.to(tl.int64)[None, :] * matrix.stride_col
    return tl.load(places, mask=row_mask[:, None] & col_mask[None, :], other=0.0)


@triton.jit
def in_dtype_of(matrix, values, USE_TMA: tl.constexpr):
    """Rounds values to the dtype of a matrix, which is a tensor descriptor with USE_TMA."""
    if USE_TMA:
        return values.to(matrix.dtype)
    else:
        return values.to(matrix.pointer.dtype.element_ty)


@triton.jit
def store_tile(matrix, values, rows, cols, row_mask, col_mask):
    """Rounds and stores by pointers. Columns are contiguous."""
    tl.static_assert(matrix.stride_col is None)
    places = matrix.pointer + rows.to(tl.int64)[:, None] * matrix.stride + cols[None, :]
    tl.store(places, in_dtype_of(matrix, values, False), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def block_of_tile(tile, blocks, across, GROUP: tl.constexpr):
    """The place of tile number `tile` in a grid of `blocks` x `across` tiles: its index along both. The order of the
    tiles is such that GROUP of the `blocks` sweep the other dimension together.
    """
    group_tiles = GROUP * across
    first = (tile // group_tiles) * GROUP
    height = min(blocks - first, GROUP)
    return first + tile % height, (tile % group_tiles) // height


def fits_tma(tensor: Tensor | None) -> bool:
    """Whether a tensor map can address the matrix: contiguous rows that do not overlap, base and row stride multiples
    of 16 bytes.
    """
    if tensor is None:
        return True
    stride, unit = tensor.stride()
    aligned = stride * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return unit == 1 and stride >= tensor.shape[1] and aligned


def kernel_matrices(matrices: Sequence[Tensor | None], blocks: Sequence[list[int]], use_tma: bool = True) -> list:
    """How a GEMM's kernel gets its matrices: as tensor maps, each in tiles of the given size, or to be read by
    pointers.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not use_tma:
        return list(map(matrix_of, matrices))
    return [
        None if matrix is None else TensorDescriptor.from_tensor(matrix, block)
        for matrix, block in zip(matrices, blocks)
    ]
