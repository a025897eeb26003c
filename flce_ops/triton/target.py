"""The device that the kernels run on: an NVIDIA GPU, or the CPU through Triton's interpreter."""

import torch
from torch import Tensor

from flce_ops.support.vendor import made_by_nvidia
from flce_ops.triton.tiles import INTERPRETER, Tiles, tiles_of_architecture


def interpreted(tensor: Tensor) -> bool:
    return tensor.device.type != "cuda"


def tiles_for(input: Tensor, linear_weight: Tensor) -> Tiles:
    if interpreted(input):
        return INTERPRETER
    if not made_by_nvidia():
        raise NotImplementedError(
            "flce_ops.triton: its kernels are made for NVIDIA's GPUs; on AMD's call the operators (torch.ops.flce, "
            "flce_ops.linear_cross_entropy), which run in ATen there"
        )
    major, minor = torch.cuda.get_device_capability(input.device)
    return tiles_of_architecture(10 * major + minor, hidden=input.shape[1])


def multiprocessors(tensor: Tensor) -> int:
    if interpreted(tensor):
        return 4  # enough programs that tiles are shared out unevenly
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
