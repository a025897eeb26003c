"""Which rows the ATen kernels compute, and in which chunks.

Ignored tokens cost nothing on a CPU. On other devices their values do no harm.

kernel_of makes a kernel from a function `body`. The body works on chunks of rows, reads every row it is given and fills
in the results:

    a CPU        indices = 1 3 4 6         the indices of the valid tokens
                 body on those rows        matrices are gathered chunk by chunk, vectors at once
                 row k -> row indices[k]   in place; rows of ignored tokens get a constant
    elsewhere    body on all rows          a chunk of input is copied, with zeros for ignored rows
                 results are filled where ignored

The number of valid tokens is data. A CPU may read it. On a GPU the host would have to wait for all queued work. There,
zeros in input are the cheapest way to keep out nan and inf: they take D numbers per row, where a mask of the logits
would take V, and the product for grad_linear_weight reads input, too.

The rows are divided into chunks for the GEMMs, and blocks of a chunk for elementwise work:

                  V
            ┌───────────┐
          n │ product   │    u = input @ linear_weight.T + linear_bias, in the dtype that the GEMM returns
            │▒▒▒▒▒▒▒▒▒▒▒│    one block of rows at a time becomes z, then G, in the accumulation dtype; G overwrites the
            └───────────┘    product, which the two gradient GEMMs read

The product is the only matrix with all n rows of a chunk; the others have the rows of a block. On a CPU the GEMM of
bfloat16 or float16 operands rounds its result, so the product can be kept in that dtype without a further loss. For the
same reason forward may save the first R rows of the product for backward: backward gets the same bits.

BLAS reads a matrix if one stride is 1, and the rows (or columns) along it do not overlap. ATen copies every other
matrix, such as weight[:, ::2], completely. The kernels copy such a linear_weight one slice at a time.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import meta
from ..math.options import accumulation_dtype, tokens_that_count
from ..meta.call import AXES, Arguments, takes
from ..objectives.token_function import zero_where
from ..support.path import record_run
from ..support.target_range import check_target_range
from ..support.workspace import CPU_CHUNK_BYTES, CPU_ROWS, FLOAT32_SUM_BYTES, get_workspace

# N tokens, n rows of a chunk or valid ones, K classes of a target, D hidden, V vocabulary

# The value that replaces an ignored row of a matrix. For probabilities it is 1, because log 1 = 0 and log 0 = -inf.
MATRICES = {name: float(name == "teacher_probs") for name, axes in AXES.items() if axes in ("ND", "NE", "NV")}
OF_TOKENS = {name for name, axes in AXES.items() if axes in ("N", "N2")} | {"teacher_lse_pair", "student_kl"}
SPREAD_BYTES = 2 << 20  # bytes of rows that are moved at a time: they fit a CPU's cache


class RowsByChunk:
    """Stands in for an (N, D) matrix, with what the bodies, chunks.py and gradients.py use of a tensor.

    Rows are made when they are read: a copy of all rows would not fit a workspace that is smaller than input.
    """

    def __init__(
        self,
        matrix: Tensor,
        rows: int,
        make: Callable[[slice], Tensor],
        ignored: Tensor | None = None,  # (rows,) bool
        places: Tensor | None = None,  # (rows,)
    ) -> None:
        self.dtype, self.device, self.new_empty = matrix.dtype, matrix.device, matrix.new_empty
        self.shape = torch.Size((rows, matrix.shape[1]))
        self.tokens = matrix.shape[0]
        self.make = make
        self.ignored = ignored  # rows of ignored tokens; None if there are none
        self.places = places  # of the rows in the call; None if all are there

    def __getitem__(self, rows: slice) -> Tensor:
        return self.make(rows)


def zero_where_ignored(input: Tensor, values: Tensor) -> Tensor:  # (N, ...)
    """The values, with 0 at ignored rows, unless the body got only valid rows."""
    ignored = input.ignored if isinstance(input, RowsByChunk) else None
    return values if ignored is None else zero_where(ignored, values)


Body = Callable[..., None]  # takes a call and the results to fill in
Results = Sequence[Tensor]
Fills = Sequence[float | None]  # None for a result that has no entry for each token


def kernel_of(
    arguments: type[Arguments],
    *,
    checks_target: bool = False,  # for operators that get the target from the user, not from another operator
) -> Callable[[Body], Callable]:
    """Decorates a body: the kernel checks the call, allocates the results, and runs the body on the valid rows."""

    def decorate(body: Body) -> Callable:
        @takes(arguments)
        @functools.wraps(body)
        def kernel(call: Any) -> meta.Outputs:
            outputs = meta.outputs(call)
            if checks_target:
                call.all_count = check_target_range(call)
            results, fills = outputs, call.fills
            if call.written == "input":  # logits, whose rows become those of their gradient
                results, fills = (*results, call.operands.input), (*fills, 0.0)
            if call.all_count:
                body(call, results)
            else:
                on_valid_tokens(body, call, results, fills)
            return outputs

        return kernel

    return decorate


def on_valid_tokens(body: Body, call: Any, results: Results, fills: Fills) -> None:
    operands = call.operands
    of_target = "target" in call.index
    valid = tokens_that_count(operands.target, call.ignore_index) if of_target else operands.valid  # None if all count
    if valid is None or (valid.device.type == "cpu" and bool(valid.all())):
        body(call, results)
    elif valid.device.type != "cpu":
        with_zeroed_rows(body, call, results, fills, ~valid)
    else:
        with_valid_rows(body, call, results, fills, valid)


def with_valid_rows(body: Body, call: Arguments, results: Results, fills: Fills, valid: Tensor) -> None:
    indices = valid.nonzero().squeeze(1)
    by_token = [(r, fill) for r, fill in zip(results, fills) if fill is not None and len(r)]
    first = {id(r): r[: len(indices)] for r, fill in by_token}

    def of_valid(name: str, value: Any) -> Any:
        if name == "tensors" and value is not None:  # of a token function, (N, ...) or ()
            return [tensor.index_select(0, indices) if tensor.dim() else tensor for tensor in value]
        if name == "valid" or not isinstance(value, Tensor):
            return None if name == "valid" else value
        if name in MATRICES:
            return RowsByChunk(value, len(indices), lambda rows: value.index_select(0, indices[rows]), places=indices)
        return value.index_select(0, indices) if name in OF_TOKENS and len(value) else value

    call_of_valid = call.changed(of_valid)
    call_of_valid.notes += ("without ignored tokens",)
    body(call_of_valid, [first.get(id(r), r) for r in results])
    ignored = (~valid).nonzero().squeeze(1)
    for result, fill in by_token:
        spread(result, indices)
        result.index_fill_(0, ignored, fill)


def spread(rows: Tensor, indices: Tensor) -> None:
    """Moves row k to row indices[k] >= k, in place. It goes from the last to the first, so no row is overwritten before
    it moves.
    """
    step = max(SPREAD_BYTES // max(rows[0].numel() * rows.element_size(), 1), 1)
    for start in reversed(range(0, len(indices), step)):
        to = indices[start : start + step]
        rows.index_copy_(0, to, rows[start : start + len(to)].clone())


def with_zeroed_rows(body: Body, call: Arguments, results: Results, fills: Fills, ignored: Tensor) -> None:
    def zeroed(name: str, value: Any) -> Any:
        if name not in MATRICES or not isinstance(value, Tensor):
            return value
        fill = MATRICES[name]
        return RowsByChunk(
            value, value.shape[0], lambda rows: value[rows].masked_fill(ignored[rows, None], fill), ignored=ignored
        )

    body(call.changed(zeroed), results)
    for result, fill in zip(results, fills):
        # Rows of grad_input are already 0, as zeros times linear_weight. An lse_pair, (N, 2), becomes the user's lse;
        # that of a divergence stays the one of its row of zeros, which backward reads.
        pair = result.shape[1:] == (2,) and "target" in call.index
        if fill is not None and len(result) and (result.dim() == 1 or pair):
            result.masked_fill_(ignored[:, None] if pair else ignored, fill)


# A chunk has at least this many rows, even if the workspace is smaller. (With fewer rows cuBLAS splits the sums of a
# product and adds the parts in bfloat16 or float16.)
ROWS_AT_LEAST = 128
CPU_ROWS_AT_LEAST = 64
# ATen sums a single row in several threads. No block of a chunk has fewer rows than this.
ROWS_OF_A_BLOCK = 4

# Up to this many chunks, a CPU keeps the sum of grad_linear_weight in bfloat16 or float16. Rounding the logits gives
# the gradient a relative error of 6.6e-3. Rounding the sum after each chunk adds 1.6e-3 times sqrt(1 + chunks / 2):
# 7.4e-3 in all with 8 chunks (dense torch: 7.0e-3). A float32 sum would take a tenth more time and twice the memory of
# a step (bfloat16, 2048x512x32000).
ROUNDED_CHUNKS_ON_CPU = 8
# Bytes of a product that is added to a float32 sum. Such a product of some classes fits a CPU's cache; that is 1.4
# times as fast as a product of all classes.
PRODUCT_BYTES = 2 << 20

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
    return input.dtype.itemsize < 4 and input.device.type != "cuda"


def chunk_product(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:  # u, (n, V)
    """input @ linear_weight.T + linear_bias, rounded once, so that a bias that cancels a large product costs no
    digits.
    """
    if out is None:
        out = input.new_empty(input.shape[0], linear_weight.shape[0], dtype=product_dtype(input))
    whole = ((slice(None), linear_weight),)
    for classes, weight in whole if linear_weight.is_contiguous() else readable_rows(linear_weight):
        own = out if classes == slice(None) else out[:, classes]
        bias = None if linear_bias is None else linear_bias[classes]
        if out.dtype != input.dtype:
            torch.mm(input, weight.T, out_dtype=out.dtype, out=own)
            if bias is not None:
                own.add_(bias)
        elif bias is None:
            torch.mm(input, weight.T, out=own)
        else:
            torch.addmm(bias, input, weight.T, out=own)
    return out


def tokens_of(input: Tensor) -> int:
    """N, including ignored tokens: the length of the vectors that need memory beside a chunk."""
    return input.tokens if isinstance(input, RowsByChunk) else input.shape[0]


def block_bytes(input: Tensor, nbytes: int) -> int:
    """Bytes of one matrix of a block. `nbytes` are those of the workspace for matrices."""
    return min(nbytes // BLOCK_SHARE, CPU_BLOCK_BYTES) if input.device.type == "cpu" else nbytes // BLOCK_SHARE


def sums_in_float32(input: Tensor, elements: int, count: int) -> bool:
    """Whether grad_linear_weight, with `elements` numbers in bfloat16 or float16, is summed over chunks in float32."""
    rounded = 1 if input.device.type != "cpu" else ROUNDED_CHUNKS_ON_CPU
    fits = 4 * elements <= max(get_workspace() // 2, FLOAT32_SUM_BYTES)
    return input.dtype.itemsize < 4 and count > rounded and fits


def rows_per_chunk(
    input: Tensor,
    nbytes: int,  # of the workspace, for matrices
    num_classes: int,
    *,
    matrices: int = 0,
    matrices_in_block: int = 0,
    bytes_of_row: int = 0,
    reserved: int = 0,
    summed: int = 0,
) -> int:
    """How many rows fit the workspace: their product, and G's rounded copy if it needs one.

    Beside these, the workspace holds matrices in the accumulation dtype, `matrices` with n rows and `matrices_in_block`
    with the rows of a block, `bytes_of_row` for each row, `reserved` bytes, and the float32 sum of a grad_linear_weight
    of `summed` elements, if there is one.
    """
    size, (tokens, hidden), on_cpu = input.dtype.itemsize, input.shape, input.device.type == "cpu"
    # the product's itemsize, and that of G's rounded copy
    of_entry = 4 + size if size < 4 and input.device.type == "cuda" else size
    row_bytes = num_classes * (of_entry + matrices * max(size, 4)) + bytes_of_row
    # on a CPU, chunks are views of `input` if no token is ignored and BLAS can read them; otherwise copies
    if not on_cpu or isinstance(input, RowsByChunk) or not (input.is_contiguous() or readable(input)):
        row_bytes += hidden * size
    nbytes -= reserved + (matrices_in_block and matrices_in_block * block_bytes(input, nbytes))
    least = CPU_ROWS_AT_LEAST if on_cpu else ROWS_AT_LEAST
    for sum_bytes in (0, 4 * summed + PRODUCT_BYTES):
        rows = (nbytes - sum_bytes) // row_bytes
        if on_cpu:
            rows = min(rows, max(CPU_CHUNK_BYTES // row_bytes, CPU_ROWS))
        rows = max(1, min(max(rows, least), tokens))
        if size >= 4 or not summed or not sums_in_float32(input, summed, -(-tokens // rows)):
            break
    return rows


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
    call: Any,
    rows: int,
    retained: Tensor | None = None,  # the first R rows of u, which forward saved
    saved: Tensor | None = None,  # out: the same
) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of each chunk and their u, (n, V), in memory that all chunks share."""
    input, linear_weight, linear_bias = call.operands.input, call.operands.linear_weight, call.operands.linear_bias
    memory = input.new_empty(rows, linear_weight.shape[0], dtype=product_dtype(input))
    parts = cut(0, input.shape[0], rows)
    record_run(call, rows, len(parts))
    for chunk in parts:
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


def copied_rows(call: Any, nbytes: int) -> Iterator[tuple[slice, Tensor]]:
    """The same of given logits: yields the rows of each block, and a copy of their u, in the accumulation dtype."""
    logits = call.operands.input
    dtype = accumulation_dtype(logits.dtype)
    step = min(max(block_bytes(logits, nbytes) // (logits.shape[1] * dtype.itemsize), 1), max(logits.shape[0], 1))
    parts = cut(0, logits.shape[0], step)
    record_run(call, step, len(parts))
    for rows in parts:
        yield rows, rows_of(logits, rows).to(dtype, copy=True)


def row_blocks(input: Tensor, chunk: slice, product: Tensor, nbytes: int, *vectors: Tensor) -> Iterable[tuple]:
    """For each block of `nbytes`: its rows within the chunk, and its part of the product and of the vectors."""
    row_bytes = max(product.shape[1], 1) * max(input.dtype.itemsize, 4)  # a rank may have no class
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
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    return not matrix.numel() or (across == 1 and down >= columns) or (down == 1 and across >= rows)


def copy_bytes(*matrices: Tensor | None) -> int:
    """Bytes for the copies of one slice of each of those matrices that BLAS cannot read."""
    largest = 0
    for matrix in matrices:
        if matrix is not None and not (matrix.is_contiguous() or readable(matrix)):
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
