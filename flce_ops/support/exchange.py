"""Collectives inside an operator, among the ranks of the process group named `group`. With one rank nothing is sent."""

from torch import Tensor

from .torch_private import collectives

# R ranks


def all_gather(numbers: Tensor, group: str | None, ranks: int) -> Tensor:  # (...) -> (R, ...)
    if ranks == 1:
        return numbers[None]
    gathered = collectives.all_gather_into_tensor(numbers, ranks, group)
    return collectives.wait_tensor(gathered).view(ranks, *numbers.shape)


def all_reduce(numbers: Tensor, group: str | None, ranks: int) -> Tensor:
    if ranks == 1:
        return numbers
    return collectives.wait_tensor(collectives.all_reduce(numbers, "sum", group))
