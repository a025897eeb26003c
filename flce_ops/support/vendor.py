"""Whose GPU it is: torch calls AMD's "cuda" too, and their capabilities look like NVIDIA's ((9, 4) is an MI300)."""

import torch
from torch import Tensor


def made_by_nvidia() -> bool:
    """Whether the GPUs of this torch are those that the Triton kernels and their tiles were made for."""
    return torch.version.hip is None


def device_name(tensor: Tensor) -> str:
    return tensor.device.type if made_by_nvidia() or tensor.device.type != "cuda" else "AMD"
