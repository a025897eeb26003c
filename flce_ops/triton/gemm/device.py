"""The device that the kernels run on: an NVIDIA GPU, or the CPU through Triton's interpreter."""

import functools

import torch
from torch import Tensor

from ..._ops import ops
from ...support.vendor import Chip, made_by_nvidia
from .tiles import AMPERE, HOPPER, INPUT_TILES, INTERPRETER, WEIGHT_TILES, Tiles, data_centre_chip
from .tma import fits_tma


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


def weight_tiles_for(grad_weight: Tensor) -> Tiles:
    hopper = "hopper, at most 64 columns" if grad_weight.shape[1] <= 64 else "hopper"
    return tiles_in(WEIGHT_TILES, grad_weight, hopper, takes_tma(grad_weight))


def main_grad_tiles_for(main_grad: Tensor) -> Tiles:
    """Tiles of the weight gradient if it is added to a buffer. Tensor maps then only load the 16-bit operands."""
    return tiles_in(WEIGHT_TILES, main_grad, "hopper", on_tma_device(main_grad) and main_grad.shape[1] % 8 == 0)


def input_tiles_for(linear_weight: Tensor, *, some_classes: bool = False) -> Tiles:
    """With `some_classes`, the tiles of a GEMM that visits only some blocks of classes: at most 128 rows."""
    columns = linear_weight.shape[1]
    hopper = "hopper" if some_classes or (columns - 1) % 256 >= 128 else "hopper, columns of 128"
    if columns <= 64 and not some_classes:
        hopper = "hopper, at most 64 columns"
    return tiles_in(INPUT_TILES, linear_weight, hopper, takes_tma(linear_weight))


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
