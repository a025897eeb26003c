"""What the operators need besides mathematics: memory limits, which path ran, devices, torch's private names, caches.

workspace.py              how much memory a call may use beside its results
path.py                   a table of paths; which path ran and why
sizes.py                  arithmetic of sizes; sizes and numbers that a compiled graph learns when it runs
target_range.py           a class index outside the vocabulary is an error
refusals.py               what is not implemented, with the error texts; hints for a likely mistake
torch_private.py          private names of torch
compile_cache.py          torch.compile's caches, keyed by this package's code

This file has the oldest torch and Triton that the package runs with. An older version raises an error, which names it:
of torch when flce_ops is imported, of Triton when flce_ops.triton is. Also the GPU's vendor, and whether Triton is
installed. torch calls AMD's GPUs "cuda", too, and their capabilities look like NVIDIA's ((9, 4) is an MI300).
"""

import functools
import importlib.util
import re
from typing import NamedTuple

import torch

OLDEST = {"torch": (2, 11), "triton": (3, 6)}


def check_version(library: str, version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    oldest = OLDEST[library]
    if found is not None and tuple(map(int, found.groups())) < oldest:
        wanted = ".".join(map(str, oldest))
        raise ImportError(
            f'flce_ops: expected {library} {wanted} or later, got {version}; pip install -U "{library}>={wanted}"'
        )


check_version("torch", torch.__version__)


class Chip(NamedTuple):
    """The properties of a GPU that kernels depend on."""

    capability: int  # 90 for sm_90
    multiprocessors: int


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
