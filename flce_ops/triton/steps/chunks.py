"""How the workspace is cut: rows of logits for the one-pass kernel, rows and columns for the recomputing one."""

import triton
from torch import Tensor

from flce_ops.math.options import Operands
from flce_ops.meta.call import Arguments
from flce_ops.support.path import record_run
from flce_ops.support.workspace import get_workspace, matrix_bytes
from flce_ops.triton.gemm.gemm_operands import fits_tma
from flce_ops.triton.gemm.parts import MOST_PARTS
from flce_ops.triton.gemm.target import tiles_for

# N tokens, n rows of a chunk, D hidden, V vocabulary

MULTIPLE = 128  # rows and columns of a GEMM tile
# Part of the workspace for what is small beside the (n, V) matrix. It is used twice in turn: for sums per tile of 256
# columns (two float32 against 256 half numbers), then for float32 products with linear_weight.
SMALL_BYTES = 8 << 20
# Of a one-pass step, per token: its places, weights, and what is known of a row. The default workspace then has room
# for 2048 rows at V = 128256 and 16384 tokens, which fill the multiprocessors evenly; with 128 it would not.
TOKEN_BYTES = 48


def small_bytes() -> int:
    return min(SMALL_BYTES, get_workspace() // 16)


def rows_that_fit(tokens: int, columns: int, itemsize: int, reserved: int, row_bytes: int = 0) -> int:
    """Rows of `columns` numbers and `row_bytes` that fit the workspace, a multiple of 128, at least 128."""
    left = matrix_bytes(tokens, TOKEN_BYTES) - small_bytes() - reserved
    rows = left // (padded(columns, itemsize) * itemsize + row_bytes)
    return max(rows // MULTIPLE * MULTIPLE, MULTIPLE)


def rows_of_chunks(
    tokens: int,
    columns: int,
    hidden: int,
    itemsize: int,
    *,
    want_input: bool,
    sum_bytes: int,  # what a sum of grad_linear_weight over chunks takes beside it, 0 where it is not wanted
    sum_pairs: int,  # numbers a row and tile beside the two of any step, by twos
) -> int:
    """Rows of a one-pass chunk that fit."""
    reserved = small_bytes() * sum_pairs
    row_bytes = 0 if want_input else hidden * itemsize  # the kept tokens wait in grad_input
    fitting = rows_that_fit(tokens, columns, itemsize, reserved, row_bytes)
    if fitting < tokens:
        fitting = rows_that_fit(tokens, columns, itemsize, reserved + sum_bytes, row_bytes)
    return fitting


def product_bytes(fitting: int, rows: int, columns: int, hidden: int, itemsize: int) -> int:
    """For the float32 products of grad_input: the small part, and what chunks of fewer rows than fit leave over.

    No more than the most parts take: 100 rows of 4096 features 25 MiB, where 459 MiB of the default would be left.
    """
    left = small_bytes() + (fitting - rows) * padded(columns, itemsize) * itemsize
    return min(left, 4 * MOST_PARTS.value * rows * hidden)


def slices(total: int, at_most: int, multiple: int = MULTIPLE) -> list[slice]:
    """range(total) in the fewest pieces of at most `at_most`, of about one size: small ones starve their GEMMs."""
    if not total:
        return []
    pieces = triton.cdiv(total, at_most)
    size = min(at_most, triton.cdiv(triton.cdiv(total, pieces), multiple) * multiple)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def record_chunks(call: Arguments, linear_weight: Tensor, rows: list[slice], *notes: str) -> None:
    """For flce_ops.last_path(). The kept tokens' rows are laid out like linear_weight's, which decides on the tiles."""
    tma = tiles_for(linear_weight).tma and fits_tma(linear_weight)
    most = max((s.stop - s.start for s in rows), default=0)
    record_run(call, most, len(rows), "TMA tiles" if tma else "pointer tiles", *notes)


def padded(columns: int, itemsize: int) -> int:
    """Columns of a row that starts on 16 bytes, as TMA wants it."""
    multiple = 16 // itemsize
    return triton.cdiv(columns, multiple) * multiple


def contiguous(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors over tokens or classes with unit stride, as the kernels read them; matrices keep their strides."""
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)


def with_contiguous_vectors(operands: Operands) -> Operands:
    target, linear_bias, weight = contiguous(*operands[2:])
    return Operands(operands.input, operands.linear_weight, target, linear_bias, weight)
