"""Functions of rows that are written once, for tensors and for kernels. This file has the operations ("words") that
such a function may use, for tensors; in_triton.py has the same ones for kernels.

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
    """Clamps values; nan stays nan."""
    return values.clamp(lowest, highest)


def constant(values: Tensor) -> Tensor:
    """The values without a derivative."""
    return values.detach()


def number(value: Tensor | None, otherwise: float) -> Tensor | float:
    """The number of an option, which a kernel reads from memory."""
    return otherwise if value is None else value


def of_tokens(values: Tensor, at: Any) -> Tensor:
    """A number for each token. A kernel reads it at its tokens, `at`."""
    return values


def times(factor: Tensor | float, values: Tensor | float) -> Tensor | float:
    """factor * values. If either is the number 1, no operation runs, because for small tensors the overhead of a launch
    dominates.
    """
    if isinstance(factor, float) and factor == 1.0:
        return values
    return factor if isinstance(values, float) and values == 1.0 else factor * values


WORDS = ("exp", "expm1", "log", "where", "clamp", "constant", "number", "of_tokens", "times")


class RowFunction:
    words: ClassVar[dict[str, str]] = {word: word for word in WORDS}  # words and their names in in_triton.py

    def __init__(self, source: Any) -> None:
        self.source = source
        self._jit: Any = None

    def __call__(self, *args: Any) -> Any:
        return self.source(*args)

    @property
    def jit(self) -> Any:
        if self._jit is None:  # not before the first use: only code that runs kernels imports Triton
            import triton

            from . import in_triton

            source = self.source
            words = {word: getattr(in_triton, name) for word, name in (("tl", "tl"), *self.words.items())}
            function = types.FunctionType(source.__code__, {**source.__globals__, **words}, source.__name__)
            function.__module__, function.__qualname__ = source.__module__, source.__qualname__
            self._jit = triton.jit(function)
        return self._jit
