"""How a step divides its tokens into chunks: E, or stored logits and G, of a chunk's tokens fill the workspace."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ...math.options import Operands
from ...math.token_weights_and_denominator import Reduction
from ...meta.call import Arguments
from ...support.path import record_run
from ...support.sizes import cdiv
from ...support.workspace import get_workspace, least_rows
from ..gemm.input_gradient import RANGE_BYTES, TILE_OVERHEAD, fastest_tiles, ranges_of
from ..gemm.tiles import (
    EPILOGUE_N,
    WEIGHT_TILES,
    Tiles,
    fits_tma,
    input_tiles_for,
    multiprocessors,
    tiles_for,
    weight_tiles_for,
)
from ..gemm.weight_gradient import sum_bytes

# N tokens, n rows of a chunk, D hidden, V vocabulary

MULTIPLE = 128  # rows and columns of a GEMM tile
# Bytes that a one-pass step needs for each token: indices, weights and row statistics. With 48 bytes, chunks of 2048
# rows fit the default workspace at V = 128256 and 16384 tokens, and 2048 rows fill the multiprocessors evenly. With 128
# bytes they would not fit.
TOKEN_BYTES = 48
PRODUCT_BYTES = 8 << 20  # float32 products with linear_weight get at least so many bytes
CHUNKS_MORE = 2  # tokens are divided into the fewest chunks, or up to this many more
SPLITS_OF_FEW = 8  # splits of V for which there is room if only one tile of rows holds tokens
# Costs in steps of a GEMM's main loop, of 0.9 us on an H200. Adding to a tile of grad_linear_weight: 1 for its own
# time, the rest for what each chunk reads once. A chunk: its launches, which a GPU with little else to do waits for.
ADDITION_STEPS = 8
CHUNK_STEPS = 80


def slices(total: int, at_most: int, multiple: int = MULTIPLE) -> list[slice]:
    """Divides range(total) into the fewest slices of at most `at_most`. The slices have similar sizes, because small
    ones make inefficient GEMMs.
    """
    if not total:
        return []
    size = slice_size(total, at_most, multiple)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def slice_size(total: int, at_most: int, multiple: int = MULTIPLE) -> int:
    return min(at_most, cdiv(cdiv(total, cdiv(total, at_most)), multiple) * multiple)


class Problem(NamedTuple):
    """What the division of tokens into chunks depends on."""

    tokens: int
    vocab: int
    hidden: int
    itemsize: int
    want_input: bool
    want_weight: bool
    more_sums: int  # numbers per row and tile beyond the one of every step
    workspace: int
    least_rows: int
    programs: int
    input_tiles: tuple[Tiles, ...]  # of the input gradient's GEMM, to choose from
    weight_tiles: Tiles
    batch_invariant: bool = False
    reserved: int = 0  # bytes beside the chunk's matrix
    row_bytes: int = 0  # bytes of each row beside the matrix's and those of its sums

    def range_bytes(self) -> int:
        """Bytes of the products of ranges of V (input_gradient.py)."""
        several = self.batch_invariant and self.want_input and ranges_of(self.vocab) > 1
        return min(RANGE_BYTES, self.workspace // 8) if several else 0

    def sum_bytes(self) -> int:
        """Extra bytes if grad_linear_weight is a sum over several chunks."""
        return sum_bytes(self.vocab, self.hidden, self.weight_tiles) if self.want_weight else 0

    def bytes_of_row(self) -> tuple[int, int]:
        """Bytes of a row of the matrix and of what is held as long, and of the row's sums over tiles."""
        # grad_input, if wanted, holds the gathered tokens
        held = self.row_bytes + (0 if self.want_input else self.hidden * self.itemsize)
        sums = 4 * (1 + self.more_sums) * cdiv(self.vocab, EPILOGUE_N.value)
        return padded(self.vocab, self.itemsize) * self.itemsize + held, sums

    def least_product_bytes(self) -> int:
        return min(PRODUCT_BYTES, self.workspace // 16)

    def room(self) -> tuple[int, int]:
        """How many rows fit in a chunk, a multiple of 128 and at least least_rows, and the bytes for a chunk."""
        held, sums = self.bytes_of_row()
        left = self.workspace - TOKEN_BYTES * self.tokens - self.reserved - self.range_bytes()
        if left // (held + sums) < self.tokens:
            left -= self.sum_bytes()
        rows = min(left // (held + sums), (left - self.least_product_bytes()) // held)
        rows = max(rows // MULTIPLE * MULTIPLE, self.least_rows)
        return rows, max(left, rows * (held + sums))

    def fitting(self) -> int:
        return self.room()[0]

    def product_bytes(self, rows: int) -> int:
        """Bytes for the products of chunks of `rows` rows: what the chunks leave free, and the memory of the sums,
        which have been used by then; but no more than is useful.
        """
        if not self.want_input or self.batch_invariant:
            return self.range_bytes()
        held, sums = self.bytes_of_row()
        _, nbytes = self.room()
        room = max(nbytes - rows * held, rows * sums, self.least_product_bytes()) // 16 * 16
        _, parts = self.input_steps(rows, room // 4)
        return min(room, 4 * self.hidden * max(parts * rows * (parts > 1), SPLITS_OF_FEW * min(rows, MULTIPLE)))

    def input_steps(self, rows: int, numbers: int) -> tuple[float, int]:
        """Time of the input gradient's GEMM, in main-loop steps, and the splits of V."""
        if self.batch_invariant:
            ranges, tiles = ranges_of(self.vocab), self.input_tiles[0]
            items = cdiv(rows, tiles.block_m) * cdiv(self.hidden, tiles.block_n) * ranges
            depth = cdiv(self.vocab, tiles.block_k)
            return cdiv(items, self.programs) * (cdiv(depth, ranges) + TILE_OVERHEAD.value), ranges
        steps, splits, _ = fastest_tiles(self.input_tiles, rows, self.hidden, self.vocab, numbers, self.programs)
        return steps, splits

    def steps(self, rows: int, numbers: int) -> float:
        """Main-loop steps of a chunk, as far as they depend on how tokens are divided."""
        steps: float = CHUNK_STEPS
        if self.want_input:
            steps += self.input_steps(rows, numbers)[0]
        if self.want_weight:
            steps += ADDITION_STEPS * self.vocab * self.hidden / (128 * 256) / self.programs
        return steps

    def chunks(self) -> list[slice]:
        """Divides the tokens into the fewest chunks or up to CHUNKS_MORE more, if their rows fill the multiprocessors
        better.
        """
        tokens, fitting = self.tokens, self.fitting()
        if not tokens:
            return []
        found: list[tuple[float, int]] = []
        fewest = cdiv(tokens, fitting)
        for count in range(fewest, fewest + CHUNKS_MORE + 1):
            size = slice_size(tokens, cdiv(tokens, count * MULTIPLE) * MULTIPLE)
            numbers, whole = self.product_bytes(min(size, tokens)) // 4, cdiv(tokens, size) - 1
            steps = self.steps(tokens - whole * size, numbers)
            found.append((steps + (whole * self.steps(size, numbers) if whole else 0.0), size))
        _, size = min(found, key=lambda cut: cut[0])
        return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]


@dataclass(frozen=True)
class Chunking:
    chunks: list[slice]
    product_bytes: int  # workspace for float32 products with linear_weight


def problem_of(
    tokens: int, linear_weight: Tensor, output_mask: list[bool], *, more_sums: int = 0, batch_invariant: bool = False
) -> Problem:
    want_input, want_weight, _ = output_mask
    vocab, hidden = linear_weight.shape
    of_call = tokens, vocab, hidden, linear_weight.dtype.itemsize, want_input, want_weight, more_sums
    of_device = multiprocessors(linear_weight), input_tiles_for(linear_weight), weight_tiles_for(linear_weight)
    return Problem(*of_call, get_workspace(), least_rows(), *of_device, batch_invariant)


@functools.lru_cache(maxsize=256)
def best_chunking(problem: Problem) -> Chunking:
    chunks = problem.chunks()
    return Chunking(chunks, problem.product_bytes(chunks[0].stop) if chunks else 0)


def equal_chunking(problem: Problem) -> Chunking:
    """Chunks that are the same on all ranks, if the problem's vocabulary is the largest shard."""
    problem = problem._replace(weight_tiles=WEIGHT_TILES["hopper"])  # the same tiles on every device
    chunks = slices(problem.tokens, problem.fitting())
    return Chunking(chunks, problem.product_bytes(chunks[0].stop))


def record_chunks(call: Arguments, linear_weight: Tensor, rows: list[slice], *notes: str) -> None:
    """Records the chunks for flce_ops.last_path().

    The gathered tokens have the layout of linear_weight's rows, so linear_weight decides about TMA.
    """
    tma = tiles_for(linear_weight).tma and fits_tma(linear_weight)
    most = max((s.stop - s.start for s in rows), default=0)
    record_run(call, most, len(rows), "TMA tiles" if tma else "pointer tiles", *notes)


def padded(columns: int, itemsize: int) -> int:
    """Columns of a row, padded to a multiple of 32 bytes: with rows a multiple of 16 numbers apart, kernels load and
    store 16 bytes at a time. TMA requires a multiple of 16 bytes.
    """
    multiple = 32 // itemsize
    return cdiv(columns, multiple) * multiple


def contiguous(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gives vectors over tokens or classes unit stride, as the kernels expect. Matrices keep their strides."""
    return tuple([None if vector is None else vector.contiguous() for vector in vectors])


def make_vectors_contiguous(call: Any) -> None:  # with Operands
    input, linear_weight, *vectors = call.operands
    call.operands = Operands(input, linear_weight, *contiguous(*vectors))
    if "reduction" in vars(call):
        call.reduction = Reduction(*contiguous(*call.reduction))
