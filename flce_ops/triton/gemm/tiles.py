"""Tiles of the three GEMMs: their shapes by architecture, each with a measurement, and which of them a device takes;
nothing is autotuned. Their order, and how they are read: by tensor maps (TMA) if all matrices allow it, else by
pointers.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._ops import ops
from ...math.options import CLASSES_PER_MAXIMUM
from ...support import Chip, made_by_nvidia
from ...support.sizes import cdiv
from ...support.workspace import workspace_setting

# n rows, D hidden, V vocabulary, B blocks of classes


@dataclass(frozen=True)
class Tiles:
    """The tiles of a GEMM (M, K) @ (K, N). Logits are (n, D) @ (D, V); the gradients are (n, V) @ (V, D) and (V, n) @
    (n, D).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8  # blocks along M that sweep N together; the input's gradient ignores it
    tma: bool = True  # tensor maps and a flattened loop over tiles, if the matrices allow it
    step_time: float = 1.0  # of a main-loop step, relative to that of the other tiles of a choice

    @cached_property
    def options(self) -> dict[str, Any]:
        """Launch options that all three GEMMs take. Operands have 16 bits; only Triton's interpreter also runs float32
        operands.
        """
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# Classes that an epilogue of the logits GEMM takes and stores at a time: all BLOCK_N of a program, or half of them.
EPILOGUE_N = tl.constexpr(CLASSES_PER_MAXIMUM)
# H200, exponentials stored, TFLOP/s at 2048x4096x128256 / 1664x2304x256000 / 1664x896x151936 / 1920x640x262144
#   661 / 633 / 553 / 510   these tiles; cuBLAS, which stores logits: 657 / 647 / 589 / 587
#   664 / 643 / 538 / 500   three stages
#   653 / 617 / 525 / 462   three stages, and an epilogue that takes 256 classes and stores them in halves
#   656 / 620 / 525 / 466   an epilogue that takes 64 classes
#   508 / 477 / 403         128x128, two programs per multiprocessor, in another run
HOPPER = Tiles(128, 256, 64, num_warps=8, num_stages=4, group=16)
# With four warps ptxas keeps up to 2 KiB of registers per thread in memory, with eight none in most variants (sm_80,
# sm_120: python -m benchmarks.kernels.compile_cards). No such card was available, so neither was timed.
AMPERE = Tiles(128, 128, 32, num_warps=8, num_stages=3, tma=False)
INTERPRETER = Tiles(32, 128, 32, num_warps=1, num_stages=1, tma=False)


# H200, TFLOP/s at 2048x4096x128256 / 4096x1536x50257 / 2048x896x151936
#   input       712 / 661 / 551   these tiles, V in three splits; cuBLAS 713 / 794 / 628
#               719 / 440 / 346   256x128, one split
#   weight      682 / 701 / 606   these tiles, first chunk; cuBLAS 684 / 475 / 619
#               663 / 683 / 642   a later chunk; cuBLAS 663 / 396 / 649
# A later chunk at 2048x4096x128256 / 1664x896x151936 / 1920x640x262144 / 4096x768x50304
#               623 / 537 / 524 / 630   these tiles; cuBLAS 632 / 588 / 609 / 649
#               619 / 546 / 528 / 655   four stages, groups of 16: no gain in a step, which the card's power limits
#               570 / 525 / 562 / 588   256x128, which wastes no columns at D = 640
#               588 at D = 4096, 558 at D = 896: 128x128. Twice as many tiles fill the multiprocessors with 512 rows
# The input's gradient has few tiles with long main loops, so its loop over tiles is never flattened.
INPUT_TILES = {
    "hopper": Tiles(128, 256, 64, num_warps=8, num_stages=4),
    "hopper, columns of 128": Tiles(256, 128, 64, num_warps=8, num_stages=4),
    "hopper, at most 64 columns": Tiles(128, 64, 64, num_warps=4, num_stages=6),
    "hopper, few rows": Tiles(128, 128, 64, num_warps=8, num_stages=6, step_time=0.6),
    "hopper, by pointers": Tiles(128, 128, 32, num_warps=4, num_stages=3, tma=False),
    "ampere": Tiles(128, 128, 32, num_warps=8, num_stages=3, tma=False),
    "interpreter": Tiles(32, 64, 32, num_warps=1, num_stages=1, tma=False),
}
WEIGHT_TILES = {
    "hopper": Tiles(128, 256, 64, num_warps=8, num_stages=3),
    "hopper, columns of 128": Tiles(256, 128, 64, num_warps=8, num_stages=3),
    "hopper, at most 64 columns": Tiles(128, 64, 64, num_warps=4, num_stages=5),
    "hopper, by pointers": Tiles(128, 128, 32, num_warps=4, num_stages=3, tma=False),
    "ampere": Tiles(128, 128, 32, num_warps=8, num_stages=3, tma=False),
    "interpreter": Tiles(64, 64, 32, num_warps=1, num_stages=1, tma=False),
}


@cache
def data_centre_chip(capability: int) -> bool:
    """Whether the chip is a data-centre GPU of Hopper or later. Only these GPUs have both TMA and 227 KiB of shared
    memory.
    """
    return capability // 10 in (9, 10)


def interpreted(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def tiles_for(input: Tensor) -> Tiles:
    if input.device.type == "cpu":
        return INTERPRETER
    return HOPPER if on_tma_device(input) else AMPERE


def tiles_in(table: dict[str, Tiles], matrix: Tensor, hopper: str, takes_maps: bool) -> Tiles:
    if matrix.device.type == "cpu":
        return table["interpreter"]
    if takes_maps:
        return table[hopper]
    return table["hopper, by pointers" if on_tma_device(matrix) else "ampere"]


def weight_tiles_for(grad_weight: Tensor, *, some_classes: bool = False) -> Tiles:
    """With `some_classes`, the tiles of a GEMM that visits only some blocks of classes: at most 128 rows."""
    columns = grad_weight.shape[1]
    hopper = "hopper, at most 64 columns" if columns <= 64 else "hopper"
    # Tiles of 256 columns would compute a fifth more columns than there are, or twice as many. H200, time of a step
    # with tiles of 128 over that with 256: 0.96 at D = 640, 0.99 at 1152, 1.01 at 896, 1.07 at 2064.
    if not some_classes and columns > 64 and cdiv(columns, 128) in (1, 3, 5):
        hopper = "hopper, columns of 128"
    return tiles_in(WEIGHT_TILES, grad_weight, hopper, takes_tma(grad_weight))


def main_grad_tiles_for(main_grad: Tensor) -> Tiles:
    """Tiles of the weight gradient if it is added to a buffer. Tensor maps then only load the 16-bit operands."""
    return tiles_in(WEIGHT_TILES, main_grad, "hopper", on_tma_device(main_grad) and main_grad.shape[1] % 8 == 0)


def input_tiles_for(linear_weight: Tensor, some_classes: bool = False) -> tuple[Tiles, ...]:
    """Tiles to choose from by the number of rows; the first for any. With `some_classes`, the tiles of a GEMM that
    visits only some blocks of classes: at most 128 rows. Chunks have few rows only where a workspace was set.
    """
    columns = linear_weight.shape[1]
    hopper = "hopper" if some_classes or (columns - 1) % 256 >= 128 else "hopper, columns of 128"
    if columns <= 64 and not some_classes:
        hopper = "hopper, at most 64 columns"
    names = (hopper,) if columns <= 64 or workspace_setting() == "auto" else (hopper, "hopper, few rows")
    takes_maps = takes_tma(linear_weight)
    return tuple(tiles_in(INPUT_TILES, linear_weight, name, takes_maps) for name in names)


def takes_tma(matrix: Tensor) -> bool:
    """Whether the matrix's layout and the device allow tensor maps."""
    return on_tma_device(matrix) and fits_tma(matrix)


def on_tma_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu" and data_centre_chip(chip_of(tensor.device).capability)


def chip_of(device: torch.device) -> Chip:
    """For a meta tensor: the current GPU, whose kernels are compiled (first_call.py)."""
    return chip_of_gpu(torch.device("cuda", torch.cuda.current_device()) if device.type == "meta" else device)


@functools.cache
def chip_of_gpu(device: torch.device) -> Chip:
    if not made_by_nvidia():
        raise NotImplementedError(
            f"flce_ops.triton: its kernels are made for NVIDIA's GPUs; on AMD's call the operators ({ops.__name__}, "
            "flce_ops.linear_cross_entropy), which run in ATen there"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return Chip(10 * major + minor, torch.cuda.get_device_properties(device).multi_processor_count)


def multiprocessors(tensor: Tensor) -> int:
    if tensor.device.type == "cpu":
        return 4  # 4 programs divide the tiles unevenly in tests, as a GPU's programs do
    return chip_of(tensor.device).multiprocessors


# A GEMM visits all blocks of LIVE classes, or those that a list on the device names. A sparse gradient makes G of some
# blocks for GEMMs (sparse/sparse_or_dense.py). The weight gradient then has only these blocks of its output, and
# the input gradient multiplies only these blocks of E. The host launches the same GEMMs for any list.
LIVE = tl.constexpr(128)  # classes of a block


class ClassBlocks(NamedTuple):
    """The blocks that a GEMM visits. If `number` is None, it visits all blocks."""

    number: Tensor | None = None  # () int32
    which: Tensor | None = None  # (B + 1,) int32, ascending; the number after the last is loaded but not used


EVERY_BLOCK = ClassBlocks()


@triton.jit
def number_of_steps(blocks, every, BLOCK: tl.constexpr):
    """The number of steps of BLOCK classes each, BLOCK <= LIVE, of a loop over the blocks."""
    if blocks.number is None:
        return every
    else:
        return tl.load(blocks.number) * (LIVE // BLOCK)


@triton.jit
def step_at(blocks, k, BLOCK: tl.constexpr):
    """The place of the k-th step, in units of BLOCK classes. A loop loads the place of its next iteration. If it loaded
    the place of the current iteration, the compiler would not pipeline the loop.
    """
    SPLIT: tl.constexpr = LIVE // BLOCK
    if blocks.number is None:
        return k
    else:
        k = tl.full((), k, tl.int32)
        return tl.load(blocks.which + k // SPLIT) * SPLIT + k % SPLIT


class Matrix(NamedTuple):
    """A matrix that a kernel reads or writes by pointers. Passed to kernels as one argument."""

    pointer: Tensor
    stride: int  # between rows
    stride_col: int | None = None  # between columns; None if rows are contiguous


def matrix_of(tensor: Tensor | None) -> Matrix | None:
    if tensor is None:
        return None
    stride, unit = tensor.stride()
    return Matrix(tensor, stride, None if unit == 1 else unit)


@triton.jit
def load_tile(matrix, rows, cols, row_mask, col_mask):
    """Loads by pointers."""
    places = matrix.pointer + rows.to(tl.int64)[:, None] * matrix.stride
    if matrix.stride_col is None:
        places += cols[None, :]
    else:
        places += cols.to(tl.int64)[None, :] * matrix.stride_col
    return tl.load(places, mask=row_mask[:, None] & col_mask[None, :], other=0.0)


@triton.jit
def in_dtype_of(matrix, values, USE_TMA: tl.constexpr):
    """Rounds values to the dtype of a matrix, which is a tensor descriptor with USE_TMA."""
    if USE_TMA:
        return values.to(matrix.dtype)
    else:
        return values.to(matrix.pointer.dtype.element_ty)


@triton.jit
def store_tile(matrix, values, rows, cols, row_mask, col_mask):
    """Rounds and stores by pointers. Columns are contiguous."""
    tl.static_assert(matrix.stride_col is None)
    places = matrix.pointer + rows.to(tl.int64)[:, None] * matrix.stride + cols[None, :]
    tl.store(places, in_dtype_of(matrix, values, False), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def columns_of_tile(tile, part: tl.constexpr, WIDTH: tl.constexpr):
    """Columns [part WIDTH, (part + 1) WIDTH) of a tile of WIDTH or 2 WIDTH columns."""
    if tile.shape[1] == WIDTH:
        return tile
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, WIDTH)), (0, 2, 1)))
        return left if part == 0 else right


@triton.jit
def block_of_tile(tile, blocks, across, GROUP: tl.constexpr):
    """The place of tile number `tile` in a grid of `blocks` x `across` tiles: its index along both. The order of the
    tiles is such that GROUP of the `blocks` sweep the other dimension together.
    """
    group_tiles = GROUP * across
    first = (tile // group_tiles) * GROUP
    height = min(blocks - first, GROUP)
    return first + tile % height, (tile % group_tiles) // height


def fits_tma(tensor: Tensor | None) -> bool:
    """Whether a tensor map can address the matrix: contiguous rows that do not overlap, base and row stride multiples
    of 16 bytes.
    """
    if tensor is None:
        return True
    stride, unit = tensor.stride()
    aligned = stride * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    return unit == 1 and stride >= tensor.shape[1] and aligned


def kernel_matrices(matrices: Sequence[Tensor | None], blocks: Sequence[list[int]], use_tma: bool = True) -> list:
    """How a GEMM's kernel gets its matrices: as tensor maps, each in tiles of the given size, or to be read by
    pointers.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not use_tma:
        return list(map(matrix_of, matrices))
    return [
        None if matrix is None else TensorDescriptor.from_tensor(matrix, block)
        for matrix, block in zip(matrices, blocks)
    ]
