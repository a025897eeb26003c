"""The device that the kernels run on: an NVIDIA GPU, or the CPU through Triton's interpreter."""

import functools

import torch
from torch import Tensor

from flce_ops.support.vendor import made_by_nvidia
from flce_ops.triton.tiles import (
    GRADIENT_TILES,
    INTERPRETER,
    GradientTiles,
    Tiles,
    gradient_tiles_of_architecture,
    tiles_of_architecture,
)


def interpreted(tensor: Tensor) -> bool:
    return tensor.device.type != "cuda"


def tiles_for(input: Tensor) -> Tiles:
    if interpreted(input):
        return INTERPRETER
    return tiles_of_architecture(capability_of(input.device), hidden=input.shape[1])


def gradient_tiles_for(tensor: Tensor, gradient: str, *, tma: bool) -> GradientTiles:  # "input" | "weight"
    """`tma` says whether the operands' layout allows tensor maps."""
    if interpreted(tensor):
        return GRADIENT_TILES[gradient]["interpreter"]
    return gradient_tiles_of_architecture(gradient, capability_of(tensor.device), tma=tma)


@functools.cache
def capability_of(device: torch.device) -> int:
    """90 for sm_90."""
    if not made_by_nvidia():
        raise NotImplementedError(
            "flce_ops.triton: its kernels are made for NVIDIA's GPUs; on AMD's call the operators (torch.ops.flce, "
            "flce_ops.linear_cross_entropy), which run in ATen there"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def multiprocessors(tensor: Tensor) -> int:
    if interpreted(tensor):
        return 4  # enough programs that tiles are shared out unevenly
    return multiprocessors_of(tensor.device)


@functools.cache
def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
