"""The overlay chunk, the first chunk of a one-pass step. Its exponentials are stored in the memory of
grad_linear_weight, which no result occupies yet.

grad_linear_weight has V rows of D numbers. E of D tokens has as many numbers. If both are cut along V into slices of v
columns, a slice of E fits into the memory of a slice of grad_linear_weight. They are shifted by one slice:

    grad_linear_weight    │ slice 0 │ slice 1 │ ... │ slice K-2 │ slice K-1 │
    holds first           │   E_1   │   E_2   │ ... │  E_{K-1}  │  scratch  │     workspace: E_0
    then, from the end:   slice K-1 = E_{K-1}.T @ (c input),  slice K-2 = E_{K-2}.T @ (c input),  ...

Slice k of grad_linear_weight holds E_{k+1}, which is no longer needed when slice k is written. So D tokens (all, if N
<= D) take one chunk, which needs one slice in the workspace. More than D tokens fit if the slices shrink, each to D / n
of the one before: up to D tokens and those of an ordinary chunk. The memory of the last slice serves as scratch: for
sums per tile, then for the float32 product with linear_weight.
"""

from bisect import bisect
from dataclasses import dataclass

from torch import Tensor

from ...support.integers import cdiv
from ...support.workspace import matrix_bytes
from ..gemm.split_k import float32_memory
from .chunks import TOKEN_BYTES, Problem, padded, small_bytes

# N tokens, n rows of the overlay chunk, D hidden, V vocabulary, v columns of a slice, K slices

BLOCK_V = 256  # slices are whole tiles of the logits GEMM
# With more slices, their GEMMs become inefficient. Also the scratch memory, which is one slice, would have less than 8
# bytes for each row and tile.
SLICES_AT_MOST = 32
SUM_BYTES = 8  # bytes per row and tile: a maximum and its column


@dataclass(frozen=True)
class Overlay:
    rows: int
    columns: list[slice]
    workspace_numbers: int  # numbers of the first slice
    # gathered tokens need a buffer: grad_input has fewer than `rows` rows after those of the overlay chunk
    rows_apart: bool


def overlay_chunk(problem: Problem, rows: int) -> Overlay | None:
    """An overlay chunk of `rows` tokens, or None if the memory does not hold it."""
    tokens, vocab, hidden, itemsize = problem[:4]
    if vocab < 2 * BLOCK_V:
        return None
    rows_apart = not problem.want_input or tokens < 2 * rows
    tiles = cdiv(vocab, BLOCK_V)
    left = matrix_bytes(tokens, TOKEN_BYTES) - small_bytes() - SUM_BYTES * tiles * rows * problem.sum_pairs
    left -= rows * hidden * itemsize * rows_apart + problem.sum_bytes() * (rows < tokens)
    # at least two slices, so that the last one's memory is free
    first = min(left // (rows * itemsize * BLOCK_V), cdiv(tiles, 2))
    count = len(slice_tiles(tiles, first, rows, hidden))
    if not count:
        return None
    # the smallest first slice that needs no more slices: all have similar sizes then
    first = bisect(range(first), False, key=lambda size: len(slice_tiles(tiles, size, rows, hidden)) == count)
    sizes = slice_tiles(tiles, first, rows, hidden)
    if sizes[-1] * BLOCK_V < rows - hidden:  # too little scratch for the float32 product
        return None
    starts = [BLOCK_V * sum(sizes[:k]) for k in range(count + 1)]
    columns = [slice(start, min(stop, vocab)) for start, stop in zip(starts, starts[1:])]
    return Overlay(rows, columns, rows * starts[1], rows_apart)


def slice_tiles(tiles: int, first: int, rows: int, hidden: int) -> list[int]:
    """Tiles of each slice; the first slice has `first`. Empty if that takes more than SLICES_AT_MOST slices."""
    sizes: list[int] = []
    size = first
    while tiles > 0 and size > 0 and len(sizes) < SLICES_AT_MOST:
        sizes.append(min(size, tiles))
        tiles -= size
        # the next slice of E must fit in the memory of this slice of grad_linear_weight
        size = min(size, size * hidden // rows)
    return sizes if tiles <= 0 else []


def scratch_of(overlay: Overlay, grad_weight: Tensor) -> Tensor:  # float32, flat
    """The memory of the last slice, which holds no exponentials."""
    return float32_memory(grad_weight[overlay.columns[-1]])


def places(overlay: Overlay, grad_weight: Tensor, workspace: Tensor) -> list[Tensor]:
    """Memory (n, v) for each slice of E: `workspace` (flat) for the first, then slices of grad_linear_weight."""
    size = grad_weight.element_size()
    hosts = [workspace, *(grad_weight[cols].view(-1) for cols in overlay.columns[:-1])]
    return [
        host[: overlay.rows * padded(cols.stop - cols.start, size)].view(overlay.rows, -1)[:, : cols.stop - cols.start]
        for host, cols in zip(hosts, overlay.columns)
    ]
