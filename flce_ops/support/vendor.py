"""Whose GPU it is, and whether Triton is there; what tensors on "meta" stand for.

torch calls AMD's "cuda" too, and their capabilities look like NVIDIA's ((9, 4) is an MI300).
"""

import functools
import importlib.util
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Chip(NamedTuple):
    """What kernels depend on of a GPU."""

    capability: int  # 90 for sm_90
    multiprocessors: int


H200 = Chip(90, 132)


@dataclass
class Compiling:
    """In place of a launch a kernel is compiled (triton/launch/ahead.py)."""

    chip: Chip  # that tensors on "meta" stand for
    launches: int = 0  # so far
    kernels: dict[Any, str] = field(default_factory=dict)  # Triton's futures of them, and names


compiling: ContextVar[Compiling | None] = ContextVar("flce_ops compiling", default=None)


def device_type(tensor: Tensor) -> str:
    """What a path is chosen by."""
    return "cuda" if tensor.is_meta and compiling.get() is not None else tensor.device.type


def made_by_nvidia() -> bool:
    """Whether the GPUs of this torch are those that the Triton kernels and their tiles were made for."""
    return torch.version.hip is None


def device_name(device_type: str) -> str:
    return device_type if made_by_nvidia() or device_type != "cuda" else "AMD"


@functools.cache
def has_triton() -> bool:
    """Builds of torch with CUDA bring it on Linux, not on Windows. Asked only where ATen would do as well."""
    return importlib.util.find_spec("triton") is not None
