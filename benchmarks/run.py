"""One mode at one shape: sets up every provider, checks it, measures its memory, then times all that work together."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from . import providers
from .data import IGNORED, PRIORS, SIGMA, Problem, load_problem, make_problem
from .errors import Reference, errors_of, make_reference, poison
from .loops import numbers_of_tokens, wall_time, warm_steps
from .memory import MIB, peak_bytes
from .modes import Mode, Step, prepare
from .report import Environment, Row, reason_of, say, table
from .shapes import Shape
from .timing import Timing, launch_to_return, synchronize, time_steps

# Errors above these mean a wrong result. The row says so, and the provider is timed all the same.
WRONG = {"loss": 1e-2, "dx": 5e-2, "dw": 5e-2}


HOST_SHOWS_MS = 5.0  # longer steps hide the host's time
LEAST_TOKENS, STEPS_OF_LOOP = 64, 60  # of loops whose steps have different numbers of tokens


class Settings(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    rounds: int
    ms: float
    seed: int
    ignored: float = IGNORED  # share of ignored tokens
    prior: str = PRIORS[0]
    sigma: float = SIGMA
    trained: Path | None = None  # a file with the operands


def problem_of(shape: Shape, settings: Settings) -> Problem:
    same = {"dtype": settings.dtype, "device": settings.device, "seed": settings.seed, "ignored": settings.ignored}
    if settings.trained:
        return load_problem(settings.trained, **same)
    return make_problem(shape, prior=settings.prior, sigma=settings.sigma, **same)


def measure(
    shape: Shape,
    mode: Mode,
    names: list[str],
    settings: Settings,
    environment: Environment,
    *,
    out_of_time: Callable[[], bool],
) -> list[Row]:
    device = settings.device
    if mode.name == "new_n":
        return measure_new_n(shape, mode, names, settings, environment)
    gc.collect()
    gc.freeze()  # otherwise each of the collections below takes a quarter of a second for objects of the libraries
    data = {"seed": settings.seed, "ignored": settings.ignored, "prior": settings.prior}
    problem = problem_of(shape, settings)
    valid = int(problem.valid.sum())
    prepare(problem, mode)
    reference = make_reference(problem, mode)
    mean_loss = _mean_loss(reference)
    say(f"loss {mean_loss:.2f}, seed {settings.seed}:", end=" ")

    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for name in names:
        row = rows[name] = empty_row(name, shape, mode, settings.dtype, environment=environment, **data)
        row.loss = mean_loss
        if out_of_time():
            row.reason = "time budget spent"
            continue
        say(name, end=" ")
        try:
            steps[name] = set_up(name, problem, mode, reference, row)
        except Exception as error:
            row.reason = reason_of(error)
        tidy(problem)
    del reference
    say()

    def failed(name: str, error: Exception) -> None:
        rows[name].reason = reason_of(error)
        del steps[name]
        tidy(problem)

    # A copy of the dictionary, because failed() removes entries, and a failed step must not keep its memory.
    timings = time_steps(
        dict(steps), device=device, rounds=settings.rounds, ms=settings.ms, seed=settings.seed, on_failure=failed
    )
    for name, timing in timings.items():
        note_time(rows[name], timing, timings.get("floor"), mode.tflop(shape, valid))
        if device.type == "cuda" and timing.ms < HOST_SHOWS_MS:
            rows[name].host_us = launch_to_return(steps[name])
            with torch.autograd.set_multithreading_enabled(False):
                rows[name].host_one_thread_us = launch_to_return(steps[name])
    say(table(list(rows.values())))
    return list(rows.values())


def measure_new_n(
    shape: Shape, mode: Mode, names: list[str], settings: Settings, environment: Environment
) -> list[Row]:
    """A step's wall time in loops whose steps have 64 to 2 N tokens, each another number. torch.compile is dynamic."""
    problem, device = problem_of(shape._replace(N=2 * shape.N), settings), settings.device
    prepare(problem, mode)
    step_of, loops, rows, walls = {}, {}, {}, {}
    for name in names:
        row = rows[name] = empty_row(name, shape, mode, settings.dtype, environment=environment, seed=settings.seed)
        warm, loops[name] = numbers_of_tokens(name, LEAST_TOKENS, problem.shape.N, STEPS_OF_LOOP, settings.rounds)
        try:
            step_of[name] = warm_steps(name, mode, problem, warm, dynamic=True)
            row.version, walls[name] = providers.version(name), []
        except Exception as error:
            row.reason = reason_of(error)
        tidy(problem)
    for number in range(settings.rounds):
        for name in random.Random(number).sample(list(walls), len(walls)):
            walls[name].append(wall_time(list(map(step_of[name], loops[name][number])), device))
            tidy(problem)
    for name, found in walls.items():
        middle = statistics.median(found)
        rows[name].ms, rows[name].spread = middle, (max(found) - min(found)) / middle
    say(table(list(rows.values())))
    return list(rows.values())


def one_compilation_per_shape() -> None:
    """After its limit of recompilations torch.compile silently runs eagerly, and a run has many shapes and modes."""
    import torch._dynamo

    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 4096)


def note_time(row: Row, timing: Timing, floor: Timing | None, tflop: float) -> None:
    row.ms, row.spread = timing
    row.tflops = tflop / (timing.ms / 1e3)
    if floor is not None:
        row.floor_ms, row.x_floor = floor.ms, timing.ms / floor.ms


def set_up(name: str, problem: Problem, mode: Mode, reference: Reference, row: Row) -> Step:
    """The first call on poisoned memory, its errors, and the peak of a warm call."""
    step = providers.provide(name, problem, mode)
    row.version = providers.version(name)
    device = problem.input.device
    problem.clear_gradients()
    poison(device)

    start = time.perf_counter()
    loss = step()
    synchronize(device)
    row.first_call_s = time.perf_counter() - start
    if name != "floor":
        errors = errors_of(loss, problem, reference)
        row.err_loss, row.err_dx, row.err_dw = errors
        if not errors.finite:
            raise ArithmeticError("its loss or a gradient is missing or not finite")
        wrong = [what for what, limit in WRONG.items() if (getattr(errors, what) or 0) > limit]
        row.reason = f"inaccurate: {', '.join(wrong)}" if wrong else ""
    del loss
    peak = peak_bytes(step, problem)
    row.peak_MiB = peak / MIB
    row.beyond_gradients_MiB = (peak - mode.gradient_bytes(problem.shape, problem.input.element_size())) / MIB
    return step


def empty_row(
    name: str,
    shape: Shape,
    mode: Mode,
    dtype: torch.dtype,
    *,
    seed: int,
    environment: Environment,
    ignored: float = IGNORED,
    prior: str = PRIORS[0],
) -> Row:
    return Row(
        **environment.__dict__,
        **shape._asdict(),
        ignored=ignored,
        prior=prior,
        dtype=str(dtype).removeprefix("torch."),
        mode=mode.name,
        provider=name,
        version="",
        seed=seed,
    )


def _mean_loss(reference: Reference) -> float:
    return float(reference.loss.sum().abs() / (reference.loss != 0).sum())


def tidy(problem: Problem) -> None:
    """Frees what the last provider left: its gradients, and the frames that a traceback may hold."""
    problem.clear_gradients()
    gc.collect()
