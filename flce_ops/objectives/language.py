"""Functions of rows written once: here the words that they may use, on tensors; in a kernel: in_triton.py.

@RowFunction
def of_target(surprisal, ...):      of_target(...)     on tensors
    return exp(-surprisal), ...     of_target.jit      the same source with the words of a kernel, for Triton
"""

import types
from typing import Any, ClassVar

import torch
from torch import Tensor

exp, expm1, log, where = torch.exp, torch.expm1, torch.log, torch.where


def clamp(values: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """nan stays nan."""
    return values.clamp(lowest, highest)


def constant(values: Tensor) -> Tensor:
    """Without a derivative."""
    return values.detach()


def number(value: Tensor | None, otherwise: float) -> Tensor | float:
    """An option's number, which a kernel reads from memory."""
    return otherwise if value is None else value


def of_tokens(values: Tensor, at: Any) -> Tensor:
    """A number of each token, which a kernel reads `at` its tokens."""
    return values


def times(factor: Tensor | float, values: Tensor | float) -> Tensor | float:
    """factor * values, nothing where one is the number 1: an operation on few numbers is all overhead."""
    if isinstance(factor, float) and factor == 1.0:
        return values
    return factor if isinstance(values, float) and values == 1.0 else factor * values


WORDS = ("exp", "expm1", "log", "where", "clamp", "constant", "number", "of_tokens", "times")


class RowFunction:
    words: ClassVar[dict[str, str]] = {word: word for word in WORDS}  # to their names in a kernel

    def __init__(self, source: Any) -> None:
        self.source = source
        self._jit: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.source(*args)

    @property
    def jit(self) -> Any:
        if self._jit is None:  # who runs kernels has imported Triton
            import triton

            from . import in_triton

            source = self.source
            words = {word: getattr(in_triton, name) for word, name in (("tl", "tl"), *self.words.items())}
            function = types.FunctionType(source.__code__, {**source.__globals__, **words}, source.__name__)
            function.__module__, function.__qualname__ = source.__module__, source.__qualname__
            self._jit = triton.jit(function)
        return self._jit
