"""The results of each operator, declared once: their part of the schema, their allocation, what ignored tokens have.

scalar     ()                token        (N,), or (0,) where nothing asks for it
slots      (N,) or (N, K)    class_index  (N,) int64
gradient   of an operand, or (0,) where output_mask does not want it
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flce_ops.math.precision import accumulation_dtype

# N tokens, K slots of a target, D hidden, V vocabulary


class AtIgnored(NamedTuple):
    """A result with an entry for each token: what it is at ignored ones."""

    fill: float
    dim: int = 0  # that counts the tokens


ZERO, NO_CLASS, ZERO_COLUMN = AtIgnored(0.0), AtIgnored(-1), AtIgnored(0.0, dim=1)
BY_TOKEN = ("input", "low_rank_input", "logits")  # operands (N, ...) that have a gradient


class Result(NamedTuple):
    name: str
    shape: Callable[[Any], Sequence[int]]  # of a call
    asked: Callable[[Any], Any] | None = None  # whether a call asks for it; None: each does
    at_ignored: AtIgnored | None = ZERO  # None: not by token
    dtype: torch.dtype | None = None  # None: the accumulation dtype
    operand: str = ""  # of a gradient: what it is of, in whose dtype


def scalar(name: str) -> Result:
    return Result(name, lambda call: (), at_ignored=None)


def token(name: str, asked_by: str = "") -> Result:
    """`asked_by` is the attribute of a call that asks for it."""
    return Result(name, rows_of, attrgetter(asked_by) if asked_by else None)


def class_index(name: str, asked_by: str) -> Result:
    return token(name, asked_by)._replace(at_ignored=NO_CLASS, dtype=torch.int64)


def slots(name: str) -> Result:
    return Result(name, attrgetter("operands.target.shape"))


def gradient(operand: str, place: int) -> Result:
    """`place` is its index in output_mask."""

    def shape(call: Any) -> Sequence[int]:
        of = getattr(call.operands, operand)
        return call.operands.linear_weight.shape[:1] if of is None else of.shape  # no bias: as one had it

    at_ignored = ZERO if operand in BY_TOKEN else None
    return Result(f"grad_{operand}", shape, lambda call: call.output_mask[place], at_ignored, operand=operand)


def gradients(*operands: str) -> tuple[Result, ...]:
    return tuple(gradient(operand, place) for place, operand in enumerate(operands))


def rows_of(call: Any) -> Sequence[int]:
    return call.operands[0].shape[:1]


def allocate(results: Sequence[Result], call: Any) -> tuple[Tensor, ...]:
    """Uninitialised."""
    first, found = call.operands[0], []
    accumulate = accumulation_dtype(first.dtype)
    for _, shape, asked, _, dtype, operand in results:
        like = first
        if operand:
            like = getattr(call.operands, operand)
            like = first if like is None else like
        of_dtype = like.dtype if operand else dtype or accumulate
        found.append(like.new_empty(shape(call) if asked is None or asked(call) else (0,), dtype=of_dtype))
    return tuple(found)
