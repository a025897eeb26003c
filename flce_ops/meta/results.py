"""The kinds of results of the operators. A kind says how a result appears in the schema, how it is allocated, and what
it is at ignored tokens.

scalar     ()                token        (N,), or (0,) if not requested
topk       (N,) or (N, K)    class_index  (N,) int64
gradient   of an operand, or (0,) if output_mask does not want it
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

# N tokens, K classes of a target, D hidden, V vocabulary


class AtIgnored(NamedTuple):
    """For a result with an entry for each token: its value at ignored tokens."""

    fill: float
    dim: int = 0  # the dimension of tokens


ZERO, NO_CLASS, ZERO_COLUMN = AtIgnored(0.0), AtIgnored(-1), AtIgnored(0.0, dim=1)
BY_TOKEN = ("input", "low_rank_input", "logits")  # operands (N, ...) that may have a gradient


class Result(NamedTuple):
    name: str
    shape: Callable[[Any], Sequence[int]] | None = None  # takes a call; None: (N,), or the operand's shape
    # whether a call requests it, otherwise it is (0,); None: always requested
    asked: Callable[[Any], Any] | None = None
    at_ignored: AtIgnored | None = ZERO  # None: it has no entry for each token
    dtype: torch.dtype | None = None  # None: the accumulation dtype, or the operand's
    operand: str = ""  # for a gradient: the name of its operand


def scalar(name: str) -> Result:
    return Result(name, lambda call: (), at_ignored=None)


def token(name: str, asked_by: str = "") -> Result:
    """`asked_by` is the attribute of a call that requests it."""
    return Result(name, asked=attrgetter(asked_by) if asked_by else None)


def class_index(name: str, asked_by: str) -> Result:
    return token(name, asked_by)._replace(at_ignored=NO_CLASS, dtype=torch.int64)


def topk(name: str) -> Result:
    return Result(name, attrgetter("operands.target.shape"))


def gradients(*operands: str) -> tuple[Result, ...]:
    """The gradients of operands, in the order of an output_mask."""

    def of(operand: str, place: int) -> Result:
        at_ignored = ZERO if operand in BY_TOKEN else None
        return Result(f"grad_{operand}", None, lambda call: call.output_mask[place], at_ignored, operand=operand)

    return tuple(of(operand, place) for place, operand in enumerate(operands))
