"""The vendor of the GPU, whether Triton is installed, and what meta tensors stand for.

torch calls AMD's GPUs "cuda", too, and their capabilities look like NVIDIA's ((9, 4) is an MI300).
"""

import functools
import importlib.util
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Chip(NamedTuple):
    """The properties of a GPU that kernels depend on."""

    capability: int  # 90 for sm_90
    multiprocessors: int


H200 = Chip(90, 132)


@dataclass
class Compiling:
    """Set while kernels are compiled ahead: each launch only compiles its kernel (triton/launch/ahead.py)."""

    chip: Chip  # the GPU that meta tensors stand for
    launches: int = 0  # the number of launches so far
    kernels: list[Any] = field(default_factory=list)  # those that are to be compiled
    tokens: Sequence[int] = ()  # the numbers of tokens that are traced
    # whose kernels are among them, and the largest number of tokens that is worth tracing
    heads: dict[Hashable, int] = field(default_factory=dict)


compiling: ContextVar[Compiling | None] = ContextVar("flce_ops compiling", default=None)


def made_by_nvidia() -> bool:
    """Whether this torch runs NVIDIA's GPUs, for which the Triton kernels and their tiles were made."""
    return torch.version.hip is None


def device_name(device_type: str) -> str:
    return device_type if made_by_nvidia() or device_type != "cuda" else "AMD"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Builds of torch with CUDA include Triton on Linux, but not on Windows. Called only
    if ATen can run instead.
    """
    return importlib.util.find_spec("triton") is not None
