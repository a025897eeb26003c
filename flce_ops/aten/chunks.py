"""How the ATen kernels divide their rows: into chunks for the GEMMs, and blocks of a chunk for elementwise work.

                  V
            ┌───────────┐
          n │ product   │    u = input @ linear_weight.T + linear_bias, in the dtype that the GEMM returns
            │▒▒▒▒▒▒▒▒▒▒▒│    one block of rows at a time becomes z, then G, in the accumulation dtype; G overwrites the
            └───────────┘    product, which the two gradient GEMMs read

The product is the only matrix with all n rows of a chunk; the others have the rows of a block. On a CPU the GEMM of
bfloat16 or float16 operands rounds its result, so the product can be kept in that dtype without a further loss. For the
same reason forward may save the first R rows of the product for backward: backward gets the same bits.

BLAS reads a matrix without a copy if one stride is 1, and the rows (or columns) along it do not overlap. ATen copies
every other matrix, such as weight[:, ::2], completely before a product. The kernels copy such a linear_weight one slice
at a time, into a part of the workspace that chunks leave free.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..math.options import accumulation_dtype
from ..meta.call import Arguments
from ..support.path import record_run
from ..support.workspace import get_workspace, matrix_bytes
from .valid_tokens import RowsByChunk, tokens_of

# N tokens, n rows of a chunk, D hidden, V vocabulary

# On a CPU chunks stay below the workspace, since larger ones gain little: a step of 2048x512x32000 in bfloat16 on two
# cores takes 0.57 s with chunks of 256 rows, 0.61 with 128, 0.69 with 64, 0.89 with 32. In float32 it takes 1.21, 1.37,
# 1.72 and 2.4 s.
CPU_CHUNK_BYTES = 16 << 20
CPU_ROWS = 128
# A chunk has at least this many rows, even if the workspace is smaller. (With fewer rows cuBLAS splits the sums of a
# product and adds the parts in bfloat16 or float16.)
ROWS_AT_LEAST = 128
CPU_ROWS_AT_LEAST = 64
# ATen sums a single row in several threads. No block of a chunk has fewer rows than this.
ROWS_OF_A_BLOCK = 4

# One matrix of a block takes 1 / BLOCK_SHARE of the workspace, and on a CPU at most this many bytes, for its cache. A
# step takes the same time with 1 to 8 MiB.
BLOCK_SHARE = 8
CPU_BLOCK_BYTES = 2 << 20
WHOLE_CHUNK = sys.maxsize  # a chunk is one block, if ranks share the vocabulary


def product_dtype(input: Tensor) -> torch.dtype:
    """The dtype of the GEMM's result. cuBLAS returns its float32 accumulator."""
    return accumulation_dtype(input.dtype) if input.device.type == "cuda" else input.dtype


def product_is_rounded(input: Tensor) -> bool:
    """Whether z needs memory of its own beside the product, because their dtypes differ."""
    return product_dtype(input) != accumulation_dtype(input.dtype)


def chunk_product(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # u, (n, V)
    n, dtype = input.shape[0], product_dtype(input) if out is None else out.dtype
    if readable(linear_weight):
        return product(input, linear_weight.T, dtype, linear_bias, out)
    if out is None:
        out = input.new_empty(n, linear_weight.shape[0], dtype=dtype)
    for classes, weight in readable_rows(linear_weight):
        product(input, weight.T, dtype, None if linear_bias is None else linear_bias[classes], out[:, classes])
    return out


def product(
    left: Tensor,  # (n, D)
    right: Tensor,  # (D, v)
    dtype: torch.dtype,  # product_dtype of left
    bias: Tensor | None = None,  # (v,)
    out: Tensor | None = None,
) -> Tensor:  # (n, v) in dtype
    """left @ right + bias, rounded once, so that a bias that cancels a large product costs no digits."""
    if dtype != left.dtype:
        rows = torch.mm(left, right, out_dtype=dtype, out=out)
        return rows if bias is None else rows.add_(bias)
    return torch.mm(left, right, out=out) if bias is None else torch.addmm(bias, left, right, out=out)


def block_bytes(input: Tensor) -> int:
    share = matrix_bytes(tokens_of(input)) // BLOCK_SHARE
    return min(share, CPU_BLOCK_BYTES) if input.device.type == "cpu" else share


def rows_per_chunk(
    input: Tensor,
    num_classes: int,
    *,
    matrices: int = 0,
    matrices_in_block: int = 0,
    bytes_of_row: int = 0,
    reserved: int = 0,
) -> int:
    """How many rows fit the workspace: their product, and G's rounded copy if it needs one.

    Beside these, the workspace holds matrices in the accumulation dtype, `matrices` with n rows and `matrices_in_block`
    with the rows of a block, `bytes_of_row` for each row, and `reserved` bytes.
    """
    accumulate, product = accumulation_dtype(input.dtype), product_dtype(input)
    rounded = 0 if product == input.dtype else input.dtype.itemsize
    row_bytes = num_classes * (product.itemsize + rounded + matrices * accumulate.itemsize) + bytes_of_row
    # On a CPU, chunks are views of `input` if no token is ignored (valid_tokens.py) and BLAS can read them. Otherwise
    # they are copies.
    in_place = input.device.type == "cpu" and not isinstance(input, RowsByChunk)
    if not in_place or not readable(input):
        row_bytes += input.shape[1] * input.dtype.itemsize
    beside = reserved + (matrices_in_block * block_bytes(input) if matrices_in_block else 0)
    rows = (matrix_bytes(tokens_of(input)) - beside) // row_bytes
    least = ROWS_AT_LEAST
    if input.device.type == "cpu":
        rows = min(rows, max(CPU_CHUNK_BYTES // row_bytes, CPU_ROWS))
        least = CPU_ROWS_AT_LEAST
    return max(1, min(max(rows, least), input.shape[0]))


def row_chunks(call: Arguments, input: Tensor, rows: int) -> list[slice]:
    parts = cut(0, input.shape[0], rows)
    record_run(call, rows, len(parts))
    return parts


def cut(start: int, stop: int, rows: int, least: int = 1) -> list[slice]:
    """Slices of `rows` rows each. The last one is shorter. If it has fewer than `least`, the one before it gives up as
    many. On a CPU `rows` is at least twice as many.
    """
    ends = [*range(start + rows, stop, rows), stop] if start < stop else []
    if len(ends) > 1 and stop - ends[-2] < least < rows:
        ends[-2] -= least
    return list(map(slice, [start, *ends], ends))


def rows_of(tensor: Tensor | RowsByChunk, rows: slice) -> Tensor:
    """tensor[rows], or the tensor itself if these are all rows: making a view takes as long as an operation on a few
    numbers.
    """
    if isinstance(tensor, RowsByChunk) or rows.stop - rows.start < tensor.shape[0]:
        return tensor[rows]
    return tensor


def chunk_products(
    call: Arguments,
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    rows: int,
    retained: Tensor | None = None,  # the first R rows of u, which forward saved
    saved: Tensor | None = None,  # out: the same
) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of each chunk and their u, (n, V), in memory that all chunks share."""
    memory = input.new_empty(rows, linear_weight.shape[0], dtype=product_dtype(input))
    for chunk in row_chunks(call, input, rows):
        known, count = 0, chunk.stop - chunk.start
        u = memory if count == rows else memory[:count]
        if retained is not None:
            own = retained[chunk, : u.shape[1]]
            known = own.shape[0]
            u[:known].copy_(own)
        if known < count:
            rest, out = slice(chunk.start + known, chunk.stop), u[known:] if known else u
            # not assigned to a variable, so a gathered copy of the rows is freed at once
            chunk_product(rows_of(input, rest), linear_weight, linear_bias, out)
        if saved is not None and chunk.start < saved.shape[0]:
            own = saved[chunk, : u.shape[1]]
            own.copy_(u[: own.shape[0]])
        yield chunk, u


def copied_rows(call: Any) -> Iterator[tuple[slice, Tensor]]:
    """The same of given logits: yields the rows of each block, and a copy of their u, in the accumulation dtype."""
    logits = call.operands.logits
    dtype = accumulation_dtype(logits.dtype)
    step = max(block_bytes(logits) // (logits.shape[1] * dtype.itemsize), 1)
    for rows in row_chunks(call, logits, min(step, max(logits.shape[0], 1))):
        yield rows, rows_of(logits, rows).to(dtype, copy=True)


def row_blocks(input: Tensor, chunk: slice, product: Tensor, nbytes: int, *vectors: Tensor) -> Iterable[tuple]:
    """For each block of `nbytes`: its rows within the chunk, and its part of the product and of the vectors."""
    row_bytes = max(product.shape[1], 1) * accumulation_dtype(input.dtype).itemsize  # a rank may have no class
    step = max(nbytes // row_bytes, 1)
    if input.device.type == "cpu":
        step = max(step, 2 * ROWS_OF_A_BLOCK)
    if chunk.stop - chunk.start == input.shape[0] <= step:
        return [(chunk, product, *vectors)]
    start, parts = chunk.start, cut(chunk.start, chunk.stop, step, ROWS_OF_A_BLOCK)
    # made one at a time, because a block keeps what an objective computed of it
    return ((r, product[r.start - start : r.stop - start], *(vector[r] for vector in vectors)) for r in parts)


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
