"""The first chunk of a one-pass step: its exponentials wait in the memory of grad_linear_weight, which is still empty.

grad_linear_weight has V rows of D numbers, E of D tokens has as many. Cut along V into slices of v columns, a slice of
E fits where a slice of grad_linear_weight will be, one slice off:

    grad_linear_weight    │ slice 0 │ slice 1 │ ... │ slice K-2 │ slice K-1 │
    holds first           │   E_1   │   E_2   │ ... │  E_{K-1}  │  scratch  │     workspace: E_0
    then, from the end:   slice K-1 = E_{K-1}.T @ (c input),  slice K-2 = E_{K-2}.T @ (c input),  ...

When slice k is written, what it held, E_{k+1}, has been used. So D tokens (all, at N <= D) take one chunk that needs a
slice of workspace. More tokens take slices that shrink, each D / n of the one before: up to D and an ordinary chunk's.
The last slice's place serves as scratch memory before: for sums per tile, then for the float32 product with
linear_weight.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from ...support.workspace import matrix_bytes
from ..gemm.split_k import float32_memory
from .chunks import TOKEN_BYTES, Problem, padded, small_bytes

# N tokens, n rows of the overlay chunk, D hidden, V vocabulary, v columns of a slice, K slices

BLOCK_V = 256  # slices are whole tiles of the logits GEMM
# Thinner slices starve their GEMMs. And the scratch, which is one slice, would have less than 8 bytes a row and tile.
SLICES_AT_MOST = 32
SUM_BYTES = 8  # per row and tile: a maximum and its column


@dataclass(frozen=True)
class Overlay:
    rows: int
    columns: list[slice]
    workspace_numbers: int  # of the first slice
    rows_apart: bool  # the valid tokens are allocated: grad_input has fewer than `rows` rows after the overlay chunk's


def overlay_chunk(problem: Problem, rows: int) -> Overlay | None:
    """An overlay chunk of so many of the tokens, or None where the memory does not hold it."""
    tokens, vocab, hidden, itemsize = problem[:4]
    if vocab < 2 * BLOCK_V:
        return None
    rows_apart = not problem.want_input or tokens < 2 * rows
    tiles = triton.cdiv(vocab, BLOCK_V)
    left = matrix_bytes(tokens, TOKEN_BYTES) - small_bytes() - SUM_BYTES * tiles * rows * problem.sum_pairs
    left -= rows * hidden * itemsize * rows_apart + problem.sum_bytes() * (rows < tokens)
    # at least two slices, so that the last one's place is free
    first = min(left // (rows * itemsize * BLOCK_V), triton.cdiv(tiles, 2))
    count = len(slice_tiles(tiles, first, rows, hidden))
    if not count:
        return None
    at_least = 1
    while at_least < first:  # of one size, as far as the tokens allow
        middle = (at_least + first) // 2
        if len(slice_tiles(tiles, middle, rows, hidden)) == count:
            first = middle
        else:
            at_least = middle + 1
    sizes = slice_tiles(tiles, first, rows, hidden)
    if sizes[-1] * BLOCK_V < rows - hidden:  # too little room for the float32 product
        return None
    starts = [BLOCK_V * sum(sizes[:k]) for k in range(count + 1)]
    columns = [slice(start, min(stop, vocab)) for start, stop in zip(starts, starts[1:])]
    return Overlay(rows, columns, rows * starts[1], rows_apart)


def slice_tiles(tiles: int, first: int, rows: int, hidden: int) -> list[int]:
    """Tiles of each slice, the first of `first`. None where that takes more than SLICES_AT_MOST."""
    sizes: list[int] = []
    size = first
    while tiles > 0 and size > 0 and len(sizes) < SLICES_AT_MOST:
        sizes.append(min(size, tiles))
        tiles -= size
        size = min(size, size * hidden // rows)  # E of the next slice goes where grad_linear_weight's was
    return sizes if tiles <= 0 else []


def scratch_of(overlay: Overlay, grad_weight: Tensor) -> Tensor:  # float32, flat
    """The last slice's place, which holds no exponentials."""
    return float32_memory(grad_weight[overlay.columns[-1]])


def places(overlay: Overlay, grad_weight: Tensor, workspace: Tensor) -> list[Tensor]:
    """(n, v) memory of each slice of E: `workspace` (flat) for the first, then grad_linear_weight's slices."""
    size = grad_weight.element_size()
    hosts = [workspace, *(grad_weight[cols].view(-1) for cols in overlay.columns[:-1])]
    return [
        host[: overlay.rows * padded(cols.stop - cols.start, size)].view(overlay.rows, -1)[:, : cols.stop - cols.start]
        for host, cols in zip(hosts, overlay.columns)
    ]
