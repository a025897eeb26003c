"""Loops of steps whose numbers of tokens differ, and the time of a step in a loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

from . import providers
from .data import Problem, first_tokens
from .modes import Mode, Step
from .timing import synchronize

WARM = 48  # steps before any that is timed: the numbers of tokens of a new loop have every remainder modulo 16
LONGEST_S = 60.0  # for the steps that warm up


def numbers_of_tokens(name: str, least: int, most: int, steps: int, loops: int) -> tuple[list[int], list[list[int]]]:
    """Numbers of tokens, without repetition: those of the steps that warm up, and those of each loop. QuACK takes
    multiples of 8 alone.
    """
    multiple = 8 if name.startswith("quack") else 1
    every = range(-(-least // multiple) * multiple, most + 1, multiple)
    drawn = random.Random(0).sample(every, min(len(every), WARM + steps * loops))
    return drawn[:WARM], [drawn[WARM + number :: loops] for number in range(loops)]


def warm_steps(
    name: str, mode: Mode, problem: Problem, tokens: Sequence[int], dynamic: bool | None
) -> Callable[[int], Step]:
    """A provider's step of so many tokens, after one step of each number in `tokens`.

    Raises:
        TimeoutError: these take over a minute.
    """
    make = providers.stepping(name, mode, dynamic=dynamic)
    deadline = time.monotonic() + LONGEST_S
    for done, count in enumerate(tokens):
        if time.monotonic() > deadline:
            raise TimeoutError(f"it compiles for each N: {done} of them took more than {LONGEST_S:.0f} s")
        make(first_tokens(problem, count))()
    return lambda count: make(first_tokens(problem, count))


def wall_time(steps: Sequence[Step], device: torch.device) -> float:
    """The milliseconds of a step in a loop that waits for the GPU only at its end."""
    synchronize(device)
    began = time.perf_counter()
    for step in steps:
        step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began) / len(steps)
