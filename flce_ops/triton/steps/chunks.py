"""How the workspace is cut: rows of logits for the one-pass kernel, rows and columns for the recomputing one."""

from typing import NamedTuple

import triton
from torch import Tensor

from ...math.options import Operands
from ...meta.call import Arguments
from ...support.path import record_run
from ...support.workspace import get_workspace, matrix_bytes
from ..gemm.device import tiles_for
from ..gemm.split_k import MOST_SPLITS, RANGE_BYTES, TILE_OVERHEAD, ranges_of, steps_and_splits
from ..gemm.tiles import Tiles
from ..gemm.tma import fits_tma
from ..gemm.weight_gradient import sum_bytes

# N tokens, n rows of a chunk, D hidden, V vocabulary

MULTIPLE = 128  # rows and columns of a GEMM tile
# Part of the workspace for what is small beside the (n, V) matrix. It is used twice in turn: for sums per tile of 256
# columns (two float32 against 256 half numbers), then for float32 products with linear_weight.
SMALL_BYTES = 8 << 20
# Of a one-pass step, per token: its places, weights, and what is known of a row. The default workspace then has room
# for 2048 rows at V = 128256 and 16384 tokens, which fill the multiprocessors evenly; with 128 it would not.
TOKEN_BYTES = 48
CHUNKS_MORE = 2  # than the fewest, at most
SPLITS_OF_FEW = 8  # of V, when only a tile's rows hold tokens
# Of its main loop that adding to a tile of grad_linear_weight counts for: 1 by its time apart, the rest for what each
# chunk launches and reads once.
ADDITION_STEPS = 8


def small_bytes() -> int:
    return min(SMALL_BYTES, get_workspace() // 16)


def rows_that_fit(tokens: int, columns: int, itemsize: int, reserved: int, row_bytes: int = 0) -> int:
    """Rows of `columns` numbers and `row_bytes` that fit the workspace, a multiple of 128, at least 128."""
    left = matrix_bytes(tokens, TOKEN_BYTES) - small_bytes() - reserved
    rows = left // (padded(columns, itemsize) * itemsize + row_bytes)
    return max(rows // MULTIPLE * MULTIPLE, MULTIPLE)


def product_bytes(fitting: int, rows: int, columns: int, hidden: int, itemsize: int) -> int:
    """For the float32 products of grad_input: the small part, and what chunks of fewer rows than fit leave over.

    No more than the most splits take: 100 rows of 4096 features 25 MiB, where 459 MiB of the default would be left.
    """
    left = small_bytes() + (fitting - rows) * padded(columns, itemsize) * itemsize
    return min(left, 4 * MOST_SPLITS.value * rows * hidden)


def slices(total: int, at_most: int, multiple: int = MULTIPLE) -> list[slice]:
    """range(total) in the fewest slices of at most `at_most`, of about one size: small ones starve their GEMMs."""
    if not total:
        return []
    count = triton.cdiv(total, at_most)
    size = min(at_most, triton.cdiv(triton.cdiv(total, count), multiple) * multiple)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class Problem(NamedTuple):
    """What a chunking depends on."""

    tokens: int
    vocab: int
    hidden: int
    itemsize: int
    want_input: bool
    want_weight: bool
    smoothed: bool
    sum_pairs: int
    workspace: int
    recompute_below: int
    programs: int
    tiles: Tiles  # of the input gradient's GEMM
    weight_tiles: Tiles
    batch_invariant: bool = False

    def range_bytes(self) -> int:
        """Of the products of ranges of V."""
        several = self.batch_invariant and self.want_input and ranges_of(self.vocab) > 1
        return min(RANGE_BYTES, self.workspace // 8) if several else 0

    def sum_bytes(self) -> int:
        """Of a sum of grad_linear_weight over several chunks."""
        return sum_bytes(self.vocab, self.hidden, self.weight_tiles) if self.want_weight else 0

    def fitting(self) -> int:
        """Rows of a chunk."""
        reserved = self.range_bytes()
        reserved += small_bytes() * self.sum_pairs  # numbers a row and tile beside the two of any step
        row_bytes = 0 if self.want_input else self.hidden * self.itemsize  # the valid tokens wait in grad_input
        fitting = rows_that_fit(self.tokens, self.vocab, self.itemsize, reserved, row_bytes)
        if fitting < self.tokens:
            fitting = rows_that_fit(self.tokens, self.vocab, self.itemsize, reserved + self.sum_bytes(), row_bytes)
        return fitting

    def product_bytes(self, rows: int) -> int:
        """Of the room that chunks of so many rows leave, what their products can use; for few valid tokens, too."""
        if not self.want_input or self.batch_invariant:
            return self.range_bytes()
        room = product_bytes(max(self.fitting(), rows), rows, self.vocab, self.hidden, self.itemsize)
        _, parts = self.input_steps(rows, room // 4)
        return min(room, 4 * self.hidden * max(parts * rows * (parts > 1), SPLITS_OF_FEW * min(rows, MULTIPLE)))

    def input_steps(self, rows: int, numbers: int) -> tuple[int, int]:
        depth = triton.cdiv(self.vocab, self.tiles.block_k)
        if self.batch_invariant:
            ranges, tiles = ranges_of(self.vocab), self.tiles
            items = triton.cdiv(rows, tiles.block_m) * triton.cdiv(self.hidden, tiles.block_n) * ranges
            return triton.cdiv(items, self.programs) * (triton.cdiv(depth, ranges) + TILE_OVERHEAD.value), ranges
        return steps_and_splits(rows, self.hidden, depth, numbers, self.programs, self.tiles)

    def steps(self, rows: int, numbers: int) -> float:
        """Of the GEMMs' main loops for a chunk, as far as they depend on how tokens are cut."""
        steps = 0.0
        if self.want_input:
            steps += self.input_steps(rows, numbers)[0]
        if self.want_weight:
            steps += ADDITION_STEPS * self.vocab * self.hidden / (128 * 256) / self.programs
        return steps

    def chunks(self, start: int) -> tuple[float, list[slice]]:
        """The tokens from `start` in a few chunks more than it takes, where that suits the multiprocessors better."""
        tokens, fitting = self.tokens - start, self.fitting()
        if not tokens:
            return 0.0, []
        fewest = triton.cdiv(tokens, fitting)
        counts = range(fewest, fewest + CHUNKS_MORE + 1)
        cuts = [slices(tokens, triton.cdiv(tokens, count * MULTIPLE) * MULTIPLE) for count in counts]
        cuts[1:] = [chunking for chunking in cuts[1:] if chunking[0].stop >= self.recompute_below]  # a fourth GEMM pass
        steps = [
            sum(self.steps(c.stop - c.start, self.product_bytes(chunking[0].stop) // 4) for c in chunking)
            for chunking in cuts
        ]
        best = min(range(len(cuts)), key=steps.__getitem__)
        return steps[best], [slice(start + c.start, start + c.stop) for c in cuts[best]]


def record_chunks(call: Arguments, linear_weight: Tensor, rows: list[slice], *notes: str) -> None:
    """For flce_ops.last_path().

    The valid tokens' rows are laid out like linear_weight's, which decides on the tiles.
    """
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
