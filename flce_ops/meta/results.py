"""The results of each operator, declared once: their part of the schema, their allocation, what ignored tokens have.

scalar     ()                token        (N,), or (0,) where nothing asks for it
topk       (N,) or (N, K)    class_index  (N,) int64
gradient   of an operand, or (0,) where output_mask does not want it
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

# N tokens, K classes of a target, D hidden, V vocabulary


class AtIgnored(NamedTuple):
    """A result with an entry for each token: what it is at ignored ones."""

    fill: float
    dim: int = 0  # that counts the tokens


ZERO, NO_CLASS, ZERO_COLUMN = AtIgnored(0.0), AtIgnored(-1), AtIgnored(0.0, dim=1)
BY_TOKEN = ("input", "low_rank_input", "logits")  # operands (N, ...) that have a gradient


class Result(NamedTuple):
    name: str
    shape: Callable[[Any], Sequence[int]] | None = None  # of a call; None: (N,), or that of the operand
    asked: Callable[[Any], Any] | None = None  # whether a call asks for it, else it is (0,); None: each does
    at_ignored: AtIgnored | None = ZERO  # None: not by token
    dtype: torch.dtype | None = None  # None: the accumulation dtype, or that of the operand
    operand: str = ""  # of a gradient: what it is of


def scalar(name: str) -> Result:
    return Result(name, lambda call: (), at_ignored=None)


def token(name: str, asked_by: str = "") -> Result:
    """`asked_by` is the attribute of a call that asks for it."""
    return Result(name, asked=attrgetter(asked_by) if asked_by else None)


def class_index(name: str, asked_by: str) -> Result:
    return token(name, asked_by)._replace(at_ignored=NO_CLASS, dtype=torch.int64)


def topk(name: str) -> Result:
    return Result(name, attrgetter("operands.target.shape"))


def gradients(*operands: str) -> tuple[Result, ...]:
    """In the order of an output_mask."""

    def of(operand: str, place: int) -> Result:
        at_ignored = ZERO if operand in BY_TOKEN else None
        return Result(f"grad_{operand}", None, lambda call: call.output_mask[place], at_ignored, operand=operand)

    return tuple(of(operand, place) for place, operand in enumerate(operands))
