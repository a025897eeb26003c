"""S, the number of ranges V is split into for grad_input (split-K), and the memory where their products wait.

The (n, D) output has few tiles, and each tile runs long. If the tiles do not fill the multiprocessors evenly, V is
split into S ranges, whose products wait in float32 memory until they are added. For example, 1408 tokens of 4096
features are 176 tiles, 1.33 waves of 132 programs; three splits make 528 tiles, 4 waves of a third of the length. The
device chooses the best S that the memory allows, since only the device knows how many tokens are valid.

S depends on the number of valid tokens, and so do the bits of the sum. With batch_invariant a token's bits must not
depend on other tokens. V is then split into ranges of RANGE classes, and their products are added in the order of the
ranges: by the kernel after the GEMM, or one after another in memory.

                                               H200, TFLOP/s at 1408x4096x128256: cuBLAS 665, S = 1 583, S = 3 764
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...support.sizes import cdiv
from .tiles import Tiles

# D hidden, V vocabulary

RANGE = 16384  # classes; 128256 classes are 8 ranges, and 512 x 4096 outputs then fill 132 programs evenly
RANGE_BYTES = 64 << 20  # of memory for products of ranges; if they need more, rows are processed in groups
MOST_SPLITS = tl.constexpr(16)
TILE_OVERHEAD = tl.constexpr(8)  # time to fill the pipeline and to store a tile, in main-loop steps


@triton.jit
def splits_of(
    count, D, depth, numbers, STEPS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The number S of splits that takes the fewest main-loop steps, if PROGRAMS tiles run at a time. The float32
    products of the splits must fit `numbers` numbers. With STEPS > 0, the number of ranges of so many steps.
    """
    if STEPS > 0:
        return tl.cdiv(depth, STEPS)
    else:
        tiles = tl.cdiv(count, BLOCK_M) * tl.cdiv(D, BLOCK_N)
        splits = 1 + tl.arange(0, MOST_SPLITS)
        waves = (tiles * splits + PROGRAMS - 1) // PROGRAMS
        steps = waves * ((depth + splits - 1) // splits + TILE_OVERHEAD)
        fits = (splits == 1) | (splits <= numbers // tl.maximum(count * D, 1))
        return 1 + tl.argmin(tl.where(fits, steps, 2147483647), 0)


def steps_and_splits(rows: int, hidden: int, depth: int, numbers: int, programs: int, tiles: Tiles) -> tuple[int, int]:
    """Returns the main-loop steps and S that the device chooses for this many tokens."""
    count = cdiv(rows, tiles.block_m) * cdiv(hidden, tiles.block_n)
    most = min(max(numbers // (rows * hidden), 1), MOST_SPLITS.value)
    return min(
        (cdiv(count * splits, programs) * (cdiv(depth, splits) + TILE_OVERHEAD.value), splits)
        for splits in range(1, most + 1)
    )


def ranges_of(num_classes: int) -> int:
    return cdiv(num_classes, RANGE)


def products_of_ranges(num_classes: int) -> int:
    """How many products of ranges wait in memory: none if there is one range, which the GEMM's epilogue finishes."""
    ranges = ranges_of(num_classes)
    return ranges if ranges > 1 else 0


def steps_of_range(tiles: Tiles) -> int:
    """The number of main-loop steps of a range."""
    return RANGE // tiles.block_k


def float32_memory(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as flat float32, from the first multiple of 16 bytes to the last.

    Empty if there is no such range.
    """
    numbers = tensor.view(-1)
    first = -numbers.storage_offset() % 8
    count = (numbers.shape[0] - first) // 8 * 8
    if count <= 0:
        return numbers.new_empty(0, dtype=torch.float32)
    return numbers[first : first + count].view(torch.float32)
