"""grad_linear_weight += E.T @ (c input) of few tokens, with c input in two half numbers instead of one.

    c input = high + low        E.T @ (c input) = [E; E].T @ [high; low]

A target's row of grad_linear_weight is often one token's: c input times an entry of E that is exact with its factor
(finish_rows.py). Rounding c input alone moves it by a step, where the logits' gradient in half, as plain torch has it,
is a power of two or near one. In an emulation (benchmarks/NOTES.md) 1.6e-3 becomes 7e-5 at 16 tokens, reduction="sum"
and 64000 classes (plain torch 1.3e-4), 2.3e-3 becomes 1.7e-3 at 60 tokens, "mean" (plain torch 3.8e-3).

The sum has twice the terms. Up to SPLIT_AT_MOST tokens the GEMM waits for grad_linear_weight's own bytes all the same.
"""

from torch import Tensor

from flce_ops.support.workspace import get_workspace
from flce_ops.triton.chunks import padded, slices
from flce_ops.triton.gemm import accumulate
from flce_ops.triton.scale_rows import launch_scale_rows

# n rows, D hidden, V vocabulary, v columns of a slice

SPLIT_AT_MOST = 128
STACK_SHARE = 4  # of the workspace: by default one slice at 128x128256, where eight took 0.6 ms to launch
COLUMNS_AT_LEAST = 4096  # of a slice, however small the workspace is


def split_rows(matrix: Tensor, factor: Tensor) -> Tensor:  # (2 n, C)
    """The n rows' high numbers, then their low ones."""
    halves = matrix.new_empty(2, *matrix.shape)
    launch_scale_rows(matrix, factor, *halves)
    return halves.flatten(0, 1)


def column_slices(rows: int, num_classes: int, itemsize: int) -> list[slice]:
    return slices(num_classes, max(get_workspace() // STACK_SHARE // (2 * rows * itemsize), COLUMNS_AT_LEAST))


def split_bytes(rows: int, hidden: int, num_classes: int, itemsize: int) -> int:
    """What add_split_product allocates."""
    return 2 * rows * itemsize * (padded(column_slices(rows, num_classes, itemsize)[0].stop, itemsize) + hidden)


def add_split_product(
    grad_weight: Tensor,  # (V, D)
    exponentials: Tensor,  # (n, V)
    input: Tensor,  # (n, D)
    factor: Tensor,  # (n,)
    *,
    first: bool,
) -> None:
    (rows, num_classes), size = exponentials.shape, exponentials.element_size()
    halves = split_rows(input, factor)
    columns = column_slices(rows, num_classes, size)
    memory = exponentials.new_empty(2, rows, padded(columns[0].stop, size))
    for cols in columns:
        twice = memory[:, :, : cols.stop - cols.start]
        twice.copy_(exponentials[:, cols].expand_as(twice))
        accumulate(grad_weight[cols], twice.flatten(0, 1).T, halves, first=first)
