"""Steady-state times of several steps, measured against each other in one process.

A kernel timed after a light neighbour runs on a cooler, faster card. Timing one call at a time, or always in the same
order, changes the time of the same code by 15 %. So each step runs back to back for `ms` milliseconds in a round. The
first third of them is dropped, and the order is shuffled in every round. CUDA events between the calls exclude the
host's time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from .modes import Step

MAX_CALLS = 2000  # the most calls in a round, which bounds the number of CUDA events if steps are very short
CALLS_AHEAD = 60  # a stream can hold 1024 launches that have not begun


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Timing(NamedTuple):
    ms: float  # median over all calls that are kept
    spread: float  # (slowest - fastest round) / median: smaller differences between two providers are noise


def _call_times_cuda(step: Step, calls: int, ahead_ms: float) -> list[float]:
    if ahead_ms:
        calls = min(calls, CALLS_AHEAD)
        from .busy_device import keep_busy  # imports Triton, which times on a CPU do not need

        keep_busy(ahead_ms)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def _call_times_cpu(step: Step, calls: int, _: float) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def launch_to_return(step: Step, calls: int = 60) -> float:
    """The host's part in microseconds, median. Steps run one at a time: behind a full queue the host would wait."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return statistics.median(times)


def time_steps(
    steps: dict[str, Step],
    *,
    device: torch.device,
    rounds: int,
    ms: float,
    seed: int = 0,
    ahead_ms: float = 0.0,
    on_failure: Callable[[str, Exception], None],
) -> dict[str, Timing]:
    """A step that fails is reported through on_failure and left out. The others continue.

    With ahead_ms, the GPU first waits this long in each round, and the host gets ahead of it, unless a step waits for
    the GPU. Then the times exclude the launches of short steps, as in a training step.
    """
    call_times = _call_times_cuda if device.type == "cuda" else _call_times_cpu
    order, shuffle = list(steps), random.Random(seed)
    calls: dict[str, int] = {}
    kept: dict[str, list[list[float]]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in list(order):
            try:
                if name not in calls:
                    estimate = min(call_times(steps[name], 2, 0.0))
                    calls[name] = max(3, min(MAX_CALLS, round(ms / max(estimate, 1e-3))))
                times = call_times(steps[name], calls[name], ahead_ms)
            except Exception as error:
                order.remove(name)
                on_failure(name, error)
                continue
            kept[name].append(times[len(times) // 3 :])
    timings = {}
    for name in order:
        medians = [statistics.median(times) for times in kept[name]]
        middle = statistics.median(time for times in kept[name] for time in times)
        timings[name] = Timing(middle, (max(medians) - min(medians)) / middle)
    return timings
