"""How linear_kl_div divides its tokens into chunks, and each chunk into blocks. G of a whole chunk stays in memory for
the gradient GEMMs.

The logits of both models are in memory for one block at a time, in a buffer of M rows. G of a block will overwrite the
block's student logits. The teacher's logits are in the last rows, which no G has reached yet:

    row 0        o          o + p                M - p          M
        G of earlier blocks | student's | ...   | teacher's |         o + 2 p <= M

`split_chunk` chooses the blocks whose GEMMs take the fewest waves of tiles. For example, 1408 tokens of 128256 classes
take 42 waves in blocks of 768 and 640, but 44 in blocks of 512, 512 and 384.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...math.kl_div_arguments import KlDivOperands, KlDivOptions
from ...math.shards import shard_rows
from ...objectives.divergence import DIVERGENCES
from ...support.integers import cdiv
from ...support.workspace import matrix_bytes
from ..gemm.device import multiprocessors, tiles_for, weight_tiles_for
from ..gemm.weight_gradient import sum_bytes
from ..steps.chunks import MULTIPLE, TOKEN_BYTES, product_bytes, slices, small_bytes
from ..steps.gradients import Gradients

# N tokens, n rows of a chunk, D and E hidden sizes of student and teacher, V vocabulary (of this rank), M as above

ROW_ALIGNMENT = 16  # numbers: rows of logits are padded to a multiple of this, so that loads of 16 bytes work for any V
# The size of a block when tokens need several chunks. Smaller blocks make small logits GEMMs and read the weights more
# often.
ROWS_OF_BLOCK = 512
WEIGHT_READ = 1.25  # time to read one tile of linear_weight from HBM, in tiles of 128 rows (H200, 4.2 TB/s)
LAUNCHES = 1  # the fixed cost of a block, mostly its launches, in waves of tiles
CUTS = 64  # a chunk is cut at multiples of about a 64th of its rows, so that the search takes at most a few ms


class RowChunking(NamedTuple):
    chunks: list[slice]
    blocks: list[list[slice]]  # the blocks of each chunk, counted from its first row
    rows: int  # M, the rows of the buffer
    product_bytes: int  # workspace for float32 products with linear_weight


def chunk_rows(operands: KlDivOperands, options: KlDivOptions, gradients: Gradients) -> RowChunking:
    """Chunk sizes are multiples of 128. All ranks that share a vocabulary get the same chunks, whatever the size of
    their shards.
    """
    input, linear_weight, teacher_input = operands.input, operands.linear_weight, operands.teacher_input
    (tokens, hidden), size = input.shape, input.dtype.itemsize
    classes = linear_weight.shape[0] if options.vocab_size is None else shard_rows(options.vocab_size, options.ranks)
    of_logits = row_numbers(classes) * size
    apart = hidden * size * (gradients.input is None)
    of_both = 1 if teacher_input is None else 2
    tiles = cdiv(classes, tiles_for(input).block_n)
    of_block = 4 * (DIVERGENCES[options.kind].sums + of_both) * tiles  # float32 row sums and tile maxima
    # with a teacher model, grad_input's float32 products use the memory of the teacher's logits
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
    """The most rows that fit in `memory`, as a multiple of 128; at least 128."""
    return max(memory // row_bytes // MULTIPLE * MULTIPLE, MULTIPLE)


@functools.lru_cache(maxsize=256)
def split_chunk(rows: int, room: int, most: int, tiles: int, block_m: int, programs: int) -> list[slice]:
    """Divides a chunk into blocks of at most `most` rows. `tiles` is the number of a GEMM's tiles along V."""
    apart = cdiv(rows, CUTS * MULTIPLE) * MULTIPLE
    ends, end = {rows, *range(apart, rows, apart)}, rows
    while end:  # from the last row back, the largest blocks that fit
        end = max(cdiv(end - min(most, room - end), MULTIPLE) * MULTIPLE, 0)
        ends.add(end)
    # for each row reached: waves so far, longest block, start of the last block
    cuts: dict[int, tuple[float, int, int]] = {0: (0.0, 0, 0)}
    for end in sorted(ends - {0}):
        found = []
        for start in reversed(cuts):
            block = end - start
            if block > most or end + block > room:
                break
            before, longest, _ = cuts[start]
            waves = cdiv(cdiv(block, block_m) * tiles, programs)
            took = before + max(waves, WEIGHT_READ * tiles / programs) + LAUNCHES
            found.append((took, max(longest, block), start))
        if found:
            cuts[end] = min(reversed(found), key=lambda cut: cut[:2])
    blocks, end = [], rows
    while end:
        start = cuts[end][2]
        blocks.append(slice(start, end))
        end = start
    return blocks[::-1]


def stored_dtype(input: Tensor, softcap: Tensor | None) -> torch.dtype:
    """The dtype in which logits are stored."""
    if input.dtype == torch.float16 and softcap is None:
        return torch.int16  # fixed_point.py; with a softcap there is no maximum to be relative to
    return torch.float16 if input.dtype.itemsize == 2 else input.dtype


def row_numbers(classes: int) -> int:
    return cdiv(classes, ROW_ALIGNMENT) * ROW_ALIGNMENT


def fits_in_logits(teacher_input: Tensor, classes: int, size: int) -> bool:
    """Whether the teacher's gathered rows fit in the memory of the student's logits."""
    return teacher_input.shape[1] * teacher_input.dtype.itemsize <= row_numbers(classes) * size
