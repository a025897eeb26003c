"""How the workspace is cut: rows of logits for the one-pass kernel, rows and columns for the recomputing one."""

import triton
from torch import Tensor

from flce_ops.support.path import Path, record_path
from flce_ops.support.workspace import float32_sum_fits, get_workspace, matrix_bytes
from flce_ops.triton.logits_gemm import fits_tma
from flce_ops.triton.target import tiles_for

# N tokens, n rows of a chunk, D hidden, V vocabulary

MULTIPLE = 128  # rows and columns of a GEMM tile
# Part of the workspace for what is small beside the (n, V) matrix. It is used twice in turn: for sums per tile of 256
# columns (two float32 against 256 half numbers), then for a block of the float32 product with linear_weight.
SMALL_BYTES = 8 << 20


def small_bytes() -> int:
    return min(SMALL_BYTES, get_workspace() // 16)


def rows_that_fit(tokens: int, columns: int, itemsize: int, reserved: int) -> int:
    """Rows of `columns` numbers that fit the workspace, a multiple of 128, at least 128."""
    left = matrix_bytes(tokens) - small_bytes() - reserved
    rows = left // (padded(columns, itemsize) * itemsize)
    return max(rows // MULTIPLE * MULTIPLE, MULTIPLE)


def rows_and_sum(
    tokens: int, columns: int, hidden: int, itemsize: int, *, want_weight: bool, argmax: bool, copies: int = 0
) -> tuple[int, bool]:
    """Rows that fit beside `copies` bytes, and whether grad_linear_weight is summed in float32: over one chunk it is
    rounded once anyway."""
    reserved = small_bytes() * argmax + copies  # argmax takes two more numbers a tile
    fitting = rows_that_fit(tokens, columns, itemsize, reserved)
    accum_float32 = want_weight and itemsize < 4 and fitting < tokens and float32_sum_fits(columns * hidden)
    if accum_float32:
        fitting = rows_that_fit(tokens, columns, itemsize, reserved + 4 * columns * hidden)
    return fitting, accum_float32


def product_bytes(fitting: int, rows: int, columns: int, itemsize: int) -> int:
    """Of a block of the float32 product: the small part, and what chunks of fewer rows than fit leave over."""
    return small_bytes() + (fitting - rows) * padded(columns, itemsize) * itemsize


def slices(total: int, at_most: int) -> list[slice]:
    """range(total) in the fewest pieces of at most `at_most`, of about one size: small ones starve their GEMMs."""
    if not total:
        return []
    pieces = triton.cdiv(total, at_most)
    size = min(at_most, triton.cdiv(triton.cdiv(total, pieces), MULTIPLE) * MULTIPLE)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def record_triton_path(op: str, input: Tensor, linear_weight: Tensor, rows: list[slice]) -> None:
    reason = triton_reason(input, linear_weight)
    record_path(Path(op, "triton", reason, max((s.stop - s.start for s in rows), default=0), len(rows)))


def triton_reason(input: Tensor, linear_weight: Tensor) -> str:
    tma = tiles_for(input, linear_weight).tma and fits_tma(input) and fits_tma(linear_weight)
    return f"{input.dtype} on {input.device.type}, {'TMA' if tma else 'pointer'} tiles"


def padded(columns: int, itemsize: int) -> int:
    """Columns of a row that starts on 16 bytes, as TMA and cuBLAS want it."""
    multiple = 16 // itemsize
    return triton.cdiv(columns, multiple) * multiple


def contiguous(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors over tokens or classes with unit stride, as the kernels read them; matrices keep their strides."""
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)
