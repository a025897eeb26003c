"""Whose GPU it is, and whether Triton is there.

torch calls AMD's "cuda" too, and their capabilities look like NVIDIA's ((9, 4) is an MI300).
"""

import functools
import importlib.util

import torch


def made_by_nvidia() -> bool:
    """Whether the GPUs of this torch are those that the Triton kernels and their tiles were made for."""
    return torch.version.hip is None


def device_name(device_type: str) -> str:
    return device_type if made_by_nvidia() or device_type != "cuda" else "AMD"


@functools.cache
def has_triton() -> bool:
    """Builds of torch with CUDA bring it on Linux, not on Windows. Asked only where ATen would do as well."""
    return importlib.util.find_spec("triton") is not None
