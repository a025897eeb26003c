"""How many rows of logits a chunk holds: as the workspace allows, and so that the gradient GEMMs fill the last wave."""

from collections.abc import Iterator

import triton
from torch import Tensor

from flce_ops.path import Path, record_path
from flce_ops.triton.logits_gemm import fits_tma, multiprocessors
from flce_ops.triton.tiles import tiles_for
from flce_ops.workspace import get_workspace

# N tokens, n rows of a chunk, D hidden, V vocabulary, T tiles along the vocabulary

ROWS_MULTIPLE = 128  # rows of a GEMM tile


def row_chunks(
    op: str,
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (V, D)
    row_bytes: int,  # temporary memory per row of a chunk
    *,
    gradient: bool,
    at_most: int | None = None,
) -> tuple[int, Iterator[slice]]:
    """Rows of the largest chunk, and the chunks."""
    total = input.shape[0]
    most = max(get_workspace() // row_bytes // ROWS_MULTIPLE * ROWS_MULTIPLE, ROWS_MULTIPLE)
    if at_most is not None:
        most = min(most, at_most)
    rows = fitting_rows(total, most, input.shape[1], multiprocessors(input)) if gradient else most
    rows = min(rows, total)
    tma = tiles_for(input, linear_weight).tma and fits_tma(input) and fits_tma(linear_weight)
    reason = f"{input.dtype} on {input.device.type}, {'TMA' if tma else 'pointer'} tiles"
    record_path(Path(op, "triton", reason, rows, triton.cdiv(total, rows)))
    return rows, (slice(start, min(start + rows, total)) for start in range(0, total, rows))


def fitting_rows(total: int, most: int, hidden: int, sms: int) -> int:
    """The chunk size with the least predicted time, in units of one row of a GEMM at full speed.

    grad_linear_weight += E.T @ x reads and writes all of it once a chunk: ACCUMULATE_ROWS more.
    E @ linear_weight has few output tiles: it runs in whole waves of the multiprocessors, cut along V where that helps.
    """
    if total <= most:
        return total

    def predicted(rows: int) -> float:
        full, rest = divmod(total, rows)
        return full * chunk_time(rows, hidden, sms) + (chunk_time(rest, hidden, sms) if rest else 0.0)

    candidates = range(ROWS_MULTIPLE, most + 1, ROWS_MULTIPLE)
    return min(candidates, key=lambda rows: (predicted(rows), rows))


ACCUMULATE_ROWS = 110  # H200: 594 / 639 / 655 TFLOP/s at 1024 / 1664 / 4096 rows against 669 at 8192 (D = 4096)
MOST_SPLITS = 4
SPLIT_COST = (
    1.06  # cuBLAS does not always find the best cut: 1.02 to 1.15 of an uncut GEMM (benchmarks/kernels/chunk_rows.py)
)


def chunk_time(rows: int, hidden: int, sms: int) -> float:
    logits = rows
    weight_gradient = rows + ACCUMULATE_ROWS
    tiles = triton.cdiv(rows, 128) * triton.cdiv(hidden, 256)
    cut = min(triton.cdiv(tiles * splits, sms) / splits for splits in range(2, MOST_SPLITS + 1))
    waves = min(triton.cdiv(tiles, sms), SPLIT_COST * cut)
    input_gradient = waves * sms * 128 * 256 / hidden
    return logits + weight_gradient + input_gradient


def contiguous(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors over tokens or classes with unit stride, as the kernels read them; matrices keep their strides."""
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)


def padded_columns(columns: int, itemsize: int) -> int:
    """Columns of a row that starts on 16 bytes, as TMA and cuBLAS want it."""
    multiple = 16 // itemsize
    return triton.cdiv(columns, multiple) * multiple
