"""torch.nn.functional.linear_cross_entropy with its chunked options (torch >= 2.13), at their defaults."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..data import Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "torch"


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__.split('+')[0]} has no chunked F.linear_cross_entropy (2.13 has)")
    if mode.per_token:
        raise Unavailable('reduction="none" falls back to the dense pair')
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(input, linear_weight, target, reduction):
        return F.linear_cross_entropy(input, linear_weight, target, reduction=reduction, options=options)

    return step_of(loss, problem, mode)
