"""The first chunk of a one-pass step: its exponentials wait in the memory of grad_linear_weight, which is still empty.

grad_linear_weight has V rows of D numbers, E of D tokens has as many. Cut along V into slices of v columns, a slice of
E fits where a slice of grad_linear_weight will be, one slice off:

    grad_linear_weight    │ slice 0 │ slice 1 │ ... │ slice K-2 │ slice K-1 │
    holds first           │   E_1   │   E_2   │ ... │  E_{K-1}  │           │     workspace: E_0
    then, from the end:   slice K-1 = E_{K-1}.T @ (c input),  slice K-2 = E_{K-2}.T @ (c input),  ...

When slice k is written, what it held, E_{k+1}, has been used. So D tokens (all, at N <= D) take one chunk that needs a
slice of workspace, and their part of grad_linear_weight is summed by one GEMM and rounded once. H200, 8192x4096x128256:
see benchmarks/NOTES.md.
"""

from dataclasses import dataclass

import triton
from torch import Tensor

from flce_ops.triton.chunks import MULTIPLE, padded, small_bytes
from flce_ops.workspace import matrix_bytes

# N tokens, n rows of the lead chunk, D hidden, V vocabulary, v columns of a slice, K slices

BLOCK_V = 256  # slices are whole tiles of the logits GEMM
SLICES_AT_MOST = 32  # thinner ones starve the GEMMs
SUM_BYTES = 8  # per row and tile: a float32 sum and a float32 maximum


@dataclass(frozen=True)
class Lead:
    rows: int
    columns: list[slice]
    workspace_numbers: int  # of the first slice
    scaled_apart: bool  # c input needs memory of its own: too few later rows of grad_input to wait in


def lead_chunk(
    tokens: int,
    hidden: int,
    vocab: int,
    itemsize: int,
    *,
    ordinary_rows: int,
    argmax: bool = False,
    want_input: bool = True,
) -> Lead | None:
    """The lead chunk that the workspace allows, or None where it would not be larger than the ordinary ones."""
    rows = tokens if tokens <= hidden else hidden // MULTIPLE * MULTIPLE
    if rows <= ordinary_rows or vocab < 2 * BLOCK_V:
        return None
    scaled_apart = not want_input or tokens < 2 * rows
    sums = SUM_BYTES * (1 + argmax) * triton.cdiv(vocab, BLOCK_V) * rows
    left = matrix_bytes(tokens) - small_bytes() - sums - rows * hidden * itemsize * scaled_apart
    most_tiles = left // (rows * itemsize * BLOCK_V)
    # a slice fits where the one before it goes; at least two, so that the last one's place is free
    most_tiles = min(most_tiles, triton.cdiv(triton.cdiv(vocab, BLOCK_V), 2))
    if most_tiles * BLOCK_V * SLICES_AT_MOST < vocab:
        return None
    pieces = triton.cdiv(vocab, most_tiles * BLOCK_V)
    width = min(triton.cdiv(triton.cdiv(vocab, pieces), BLOCK_V), most_tiles) * BLOCK_V
    columns = [slice(start, min(start + width, vocab)) for start in range(0, vocab, width)]
    return Lead(rows, columns, rows * width, scaled_apart)


def places(lead: Lead, grad_weight: Tensor, workspace: Tensor) -> list[Tensor]:
    """(n, v) memory of each slice of E: `workspace` (flat) for the first, then grad_linear_weight's slices."""
    size = grad_weight.element_size()
    hosts = [workspace, *(grad_weight[cols].view(-1) for cols in lead.columns[:-1])]
    return [
        host[: lead.rows * padded(cols.stop - cols.start, size)].view(lead.rows, -1)[:, : cols.stop - cols.start]
        for host, cols in zip(hosts, lead.columns)
    ]
