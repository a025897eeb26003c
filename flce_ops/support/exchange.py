"""Collectives inside an operator, among the ranks of the process group named `group`. With one rank nothing is sent."""

import torch
from torch import Tensor

# R ranks


def all_gather(numbers: Tensor, group: str | None, ranks: int) -> Tensor:  # (...) -> (R, ...)
    if ranks == 1:
        return numbers[None]
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(numbers, ranks, group)
    return torch.ops._c10d_functional.wait_tensor(gathered).view(ranks, *numbers.shape)


def all_reduce(numbers: Tensor, group: str | None, ranks: int) -> Tensor:
    if ranks == 1:
        return numbers
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(numbers, "sum", group))
