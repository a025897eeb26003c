"""Matrices that BLAS reads without a copy: one stride is 1, and the rows (or columns) along it do not overlap.

ATen copies every other matrix, such as weight[:, ::2], completely before a product. The ATen kernels copy such a
linear_weight one slice at a time, into a part of the workspace that chunks leave free.
"""

from collections.abc import Iterator

from torch import Tensor

from .workspace import get_workspace

COPY_SHARE = 4  # a fourth of the workspace holds the copy
VECTORS_AT_LEAST = 16  # the fewest rows or columns of a slice, however small the workspace is


def readable(matrix: Tensor) -> bool:
    if matrix.is_contiguous():
        return True
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return not matrix.numel() or (across == 1 and down >= columns) or (down == 1 and across >= rows)


def copy_bytes(*matrices: Tensor | None) -> int:
    """Bytes for the copies of one slice of each of those matrices that BLAS cannot read."""
    largest = 0
    for matrix in matrices:
        if matrix is not None and not readable(matrix):
            largest = max(largest, matrix.numel() * matrix.element_size())
    return min(get_workspace() // COPY_SHARE, largest) if largest else 0


def readable_rows(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows that BLAS can read: the whole matrix, or copies that share memory."""
    rows, columns = matrix.shape
    if readable(matrix):
        yield slice(0, rows), matrix
        return
    count = min(max(copy_bytes(matrix) // max(columns * matrix.element_size(), 1), VECTORS_AT_LEAST), rows)
    memory = matrix.new_empty(count, columns)
    for start in range(0, rows, count):
        part = slice(start, min(start + count, rows))
        yield part, memory[: part.stop - start].copy_(matrix[part])


def readable_columns(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for columns, piece in readable_rows(matrix.T):
        yield columns, piece.T
