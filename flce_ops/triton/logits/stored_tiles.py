"""The kernel that reads stored logits: for each tile, a function of its log-probabilities. No GEMM runs.

                 V
        ┌──┬──┬──┬──┐    for each tile:   log2_q = z - lse of the row, from the stored logits       stored.py
      n │  │▓▓│  │  │                     G = FUNCTION(log2_q, numbers of rows and columns)
        └──┴──┴──┴──┘                     out = G dz/du, rounded once

FUNCTION is `gradient_of_tile` here, or `divergence_of_tile` (divergence_rows.py), which reads the teacher's tile beside
the student's, and stores sums of the tile's rows. A program has BLOCK_N rows of one tile: EPILOGUE_N columns, which
have one maximum a row. It reads 2 bytes for each logit and writes 2, maybe over the logits: a place is read before it
is written.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...objectives.in_triton import LN2
from ...support.sizes import cdiv
from ..gemm.epilogues import Gradient, gradient_of_rows
from ..gemm.tiles import EPILOGUE_N, interpreted, matrix_of, store_tile
from ..kernel import Kernel
from ..rows.logit_numbers import LOG2E, rescaled
from ..rows.valid_tokens import ROW_MULTIPLE, ValidTokens, valid_rows
from .stored import StoredLogits, log_probabilities

# N tokens, n rows of a chunk, V vocabulary

Pair = Tensor | tuple[Tensor | None, ...]  # row_pair says how


@triton.jit
def row_pair(pair, rows, token, row_mask, KNOWN: tl.constexpr):
    """The lse_pair of each row. `pair` has two vectors (n,), or one and None; with KNOWN it is a matrix (N, 2) of all
    tokens, in nats.

    Forward takes its pair through nats as well, so that its logarithms have the bits of backward's: whether two of them
    are equal decides K in forward, and d in backward (objectives/divergence.py).
    """
    if KNOWN:
        reference = tl.load(pair + 2 * token, mask=row_mask, other=0.0)
        return rescaled(reference, tl.load(pair + 2 * token + 1, mask=row_mask, other=0.0), LOG2E)
    else:
        reference, log_sum = vectors_of_pair(pair, rows, row_mask)
        if pair[1] is not None:
            reference, log_sum = rescaled(reference, log_sum, LN2)
            reference, log_sum = rescaled(reference, log_sum, LOG2E)
        return reference, log_sum


@triton.jit
def vectors_of_pair(pair, rows, row_mask):
    """The pair (n,), (n,) or None as it is in memory."""
    reference = tl.load(pair[0] + rows, mask=row_mask, other=0.0)
    log_sum = tl.zeros_like(reference)
    if pair[1] is not None:
        log_sum = tl.load(pair[1] + rows, mask=row_mask, other=0.0)
    return reference, log_sum


@Kernel
def stored_tiles_kernel(
    stored,  # StoredLogits
    softcap,  # (), if the stored logits are those before it
    pair,  # row_pair's
    operands,  # what FUNCTION reads and writes
    out,  # Matrix (n, V) out, with zeros behind the valid rows up to a multiple of 128; None
    valid_tokens,  # ValidTokens
    n,
    V,
    FUNCTION: tl.constexpr,
    KNOWN: tl.constexpr,
    KIND: tl.constexpr,  # passed to FUNCTION, as are the next two
    OF_ENTRY: tl.constexpr,
    GRADIENT: tl.constexpr,
    WRITES: tl.constexpr,  # `out` is given; Triton 3.6 cannot compare a NamedTuple that holds None with None
    EVEN: tl.constexpr,  # V is a multiple of 8: no columns are padding
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,  # columns with one maximum per row
):
    tiles = tl.cdiv(V, BLOCK_V)
    tile = tl.program_id(0) % tiles  # in one dimension of the grid: the second one has room for 65,535 programs
    row_start = tl.program_id(0) // tiles * BLOCK_N
    rows = row_start + tl.arange(0, BLOCK_N)
    count = valid_rows(valid_tokens, n)
    if row_start < tl.cdiv(count, ROW_MULTIPLE) * ROW_MULTIPLE:
        cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        row_mask, col_mask = rows < count, cols < V
        token = tl.load(valid_tokens.order + rows, mask=row_mask, other=0)
        of_rows = row_pair(pair, rows, token, row_mask, KNOWN)
        log2_q, dz_du = log_probabilities(stored, softcap, of_rows, rows, cols, row_mask, tile, V)
        at = (rows, token, cols, row_mask, col_mask, tile)
        result = FUNCTION(operands, log2_q, at, n, V, KNOWN, KIND, OF_ENTRY, GRADIENT)
        if WRITES:
            if softcap is not None:
                result *= dz_du
            if not EVEN or softcap is not None:  # else the probability is 0 there, and so is G
                result = tl.where(row_mask[:, None] & col_mask[None, :], result, 0.0)
            # includes the padding of rows, so that stores have 16 bytes for any V
            store_tile(out, result, rows, cols, rows < n, cols < tl.cdiv(V, 8) * 8)


@triton.jit
def gradient_of_tile(operands, log2_q, at, n, V, KNOWN, KIND, OF_ENTRY, GRADIENT):
    """G of an objective of rows, from its factors (rows/gradient_factors.py)."""
    rows, _, cols, row_mask, col_mask, _ = at
    return gradient_of_rows(operands, log2_q, rows, cols, row_mask, col_mask)


def launch_stored_tiles(
    stored: StoredLogits,
    pair: Pair,
    operands: Any,
    valid_tokens: ValidTokens,
    *,
    function: Any,
    out: Tensor | None,  # (n, V)
    softcap: Tensor | None = None,
    kind: tuple[bool, ...] = (),
    of_entry: Any = None,
    gradient: Any = None,
) -> None:
    n, classes = stored.numbers.shape
    # ms at 2048x128256, G of a log-probability / with an entropy: 0.324 / 0.332 at 8 rows; 0.341 / 0.379 at 16 rows.
    # Divergences, forward / G of reverse / sums of jsd: 16 rows and 8 warps 0.486 / 0.479 / 0.682; 8 rows and 4 warps
    # 0.483 / 0.420 / 0.594; 4 rows and 2 warps 0.455 / 0.423 / 0.589.
    rows, warps = (16, 4) if interpreted(stored.numbers) or of_entry is gradient is None else (8, 2)
    stored_tiles_kernel[(cdiv(classes, EPILOGUE_N.value) * cdiv(n, rows),)](
        *(stored, softcap, pair, operands, matrix_of(out), valid_tokens, n, classes),
        FUNCTION=function,
        KNOWN=isinstance(pair, Tensor),
        KIND=kind,
        OF_ENTRY=of_entry,
        GRADIENT=gradient,
        WRITES=out is not None,
        EVEN=classes % 8 == 0,
        BLOCK_N=rows,
        BLOCK_V=EPILOGUE_N.value,
        num_warps=warps,
    )


def launch_stored_gradient(
    stored: StoredLogits,
    factors: Gradient,  # its class weights are those of the columns
    valid_tokens: ValidTokens,
    *,
    out: Tensor,  # (n, V)
) -> None:
    pair = factors.reference_logit, None
    launch_stored_tiles(stored, pair, factors, valid_tokens, function=gradient_of_tile, out=out)
