"""How linear_kl_div takes its tokens: chunks, whose G is kept for the gradients' GEMMs, and blocks of a chunk.

Both models' logits of a block exist at a time, in one memory of M rows: the student's where G will be, the teacher's in
the last rows, since rows of later blocks are not written yet:

    row 0        o          o + p                M - p          M
        G of earlier blocks | student's | ...   | teacher's |         o + 2 p <= M

Of the ways to cut a chunk so, the one whose GEMMs take the fewest waves of tiles: 1408 tokens of 128256 classes take
42 in blocks of 768 and 640, 44 in blocks of 512, 512 and 384.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...math.kl_div_arguments import KlDivOperands, KlDivOptions
from ...math.shards import shard_rows
from ...objectives.divergence import DIVERGENCES
from ...support.workspace import matrix_bytes
from ..gemm.device import multiprocessors, tiles_for, weight_tiles_for
from ..gemm.weight_gradient import sum_bytes
from ..steps.chunks import MULTIPLE, TOKEN_BYTES, product_bytes, slices, small_bytes
from ..steps.gradients import Gradients

# N tokens, n rows of a chunk, D and E hidden sizes of student and teacher, V vocabulary (of this rank), M as above

ROW_ALIGNMENT = 16  # numbers between rows of logits: 16 bytes of them are read at a time whatever V is
# Of a block, where a chunk is to have more: fewer starve the logits' GEMMs, and read the weights more often.
ROWS_OF_BLOCK = 512
WEIGHT_READ = 1.25  # a tile of linear_weight from memory, in the time of a tile of 128 rows (H200, 4.2 TB/s)
LAUNCHES = 1  # what else a block takes, in waves


class RowChunking(NamedTuple):
    chunks: list[slice]
    blocks: list[list[slice]]  # of each chunk, from its first row
    rows: int  # M
    product_bytes: int  # workspace for float32 products with linear_weight


def chunk_rows(operands: KlDivOperands, options: KlDivOptions, gradients: Gradients) -> RowChunking:
    """In multiples of 128; the same on all ranks that share a vocabulary, whatever their shard."""
    input, linear_weight, teacher_input = operands.input, operands.linear_weight, operands.teacher_input
    (tokens, hidden), size = input.shape, input.dtype.itemsize
    classes = linear_weight.shape[0] if options.vocab_size is None else shard_rows(options.vocab_size, options.ranks)
    of_logits = row_numbers(classes) * size
    apart = hidden * size * (gradients.input is None)
    of_both = 1 if teacher_input is None else 2
    tiles = triton.cdiv(classes, tiles_for(input).block_n)
    of_block = 4 * (DIVERGENCES[options.kind].sums + of_both) * tiles  # sums and maxima
    # grad_input's products wait where the teacher's logits were
    reserved = small_bytes() if teacher_input is None else small_bytes() // 8
    if teacher_input is not None and not fits_in_logits(teacher_input, classes, size):
        of_block += teacher_input.shape[1] * teacher_input.dtype.itemsize
    if gradients.linear_weight is not None:
        reserved += sum_bytes(classes, hidden, weight_tiles_for(gradients.linear_weight))
    left = matrix_bytes(tokens, TOKEN_BYTES) - reserved
    block = rows = rows_in(left, apart + of_both * of_logits + of_block)
    if rows < tokens and teacher_input is not None and any(gradient is not None for gradient in gradients):
        block = min(rows, ROWS_OF_BLOCK)
        rows = rows_in(left - block * (of_logits + of_block), apart + of_logits)
    chunks = slices(tokens, rows)
    longest = chunks[0].stop
    products = product_bytes(rows, longest, classes, hidden, size)
    if teacher_input is None:
        return RowChunking(chunks, [[slice(0, chunk.stop - chunk.start)] for chunk in chunks], longest, products)
    block = min(block, longest)
    left -= longest * apart
    room = min(max(rows_in(left - block * of_block, of_logits), longest + block), 2 * longest)
    most = max(rows_in(left - room * of_logits, of_block), block)
    of_gemm = tiles, tiles_for(input).block_m, multiprocessors(input)
    return RowChunking(chunks, [split_chunk(c.stop - c.start, room, most, *of_gemm) for c in chunks], room, products)


def rows_in(memory: int, row_bytes: int) -> int:
    """A multiple of 128, at least 128."""
    return max(memory // row_bytes // MULTIPLE * MULTIPLE, MULTIPLE)


@functools.lru_cache(maxsize=256)
def split_chunk(rows: int, room: int, most: int, tiles: int, block_m: int, programs: int) -> list[slice]:
    """Blocks of at most `most` rows; `tiles` are those of a GEMM along V."""
    ends = [*range(MULTIPLE, rows, MULTIPLE), rows]
    cuts: dict[int, tuple[float, int, list[slice]]] = {0: (0.0, 0, [])}  # up to a row: waves, longest block, blocks
    for end in ends:
        found = []
        for start, (before, longest, blocks) in cuts.items():
            block = end - start
            if block <= most and end + block <= room:
                waves = triton.cdiv(triton.cdiv(block, block_m) * tiles, programs)
                took = before + max(waves, WEIGHT_READ * tiles / programs) + LAUNCHES
                found.append((took, max(longest, block), [*blocks, slice(start, end)]))
        if found:
            cuts[end] = min(found, key=lambda chunking: chunking[:2])
    return cuts[rows][2]


def stored_dtype(input: Tensor, softcap: Tensor | None) -> torch.dtype:
    """Of logits."""
    if input.dtype == torch.float16 and softcap is None:
        return torch.int16  # fixed_point.py, of logits that have a maximum
    return torch.float16 if input.dtype.itemsize == 2 else input.dtype


def row_numbers(classes: int) -> int:
    return triton.cdiv(classes, ROW_ALIGNMENT) * ROW_ALIGNMENT


def fits_in_logits(teacher_input: Tensor, classes: int, size: int) -> bool:
    """Whether the teacher's rows can wait where the student's logits will be."""
    return teacher_input.shape[1] * teacher_input.dtype.itemsize <= row_numbers(classes) * size
