"""python -m benchmarks.objectives: everything a head can compute besides the mean over class indices, in one run.

At each shape all steps of LINES are timed in the same shuffled rounds, so that the ratio of any two comes from the same
conditions. objectives.csv has a row for each; `python -m benchmarks.tables` makes the documents' tables from them. The
bare GEMMs are three (four for a divergence) in bfloat16, over the valid tokens (over all, for a divergence).

First calls compile for minutes. Other processes make them before the run, --processes at a time, into the caches on
disk.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from . import providers
from .command import command, report_of
from .data import make_problem
from .errors import make_reference
from .modes import METRICS, MODES, Mode, prepare
from .report import Environment, Row, environment, reason_of, say, table
from .run import empty_row, note_time, one_compilation_per_shape, set_up, tidy
from .shapes import Shape, parse_shapes
from .timing import time_steps

# N tokens, D hidden, V vocabulary

SHAPES = "4096x2048x128256,4096x4096x151936"
PER_TOKEN = ("ours", "ours_retained", "torch_compile", "trl", "verl")
LINES: tuple[tuple[str, tuple[str, ...]], ...] = (  # all bfloat16: (mode, providers)
    ("fwd_bwd", ("floor", "ours", "torch_compile")),
    *((f"metric_{name}", ("ours",)) for name in METRICS),
    ("metrics", ("ours",)),
    ("none", PER_TOKEN),
    ("log_probs", PER_TOKEN),
    ("policy", ("ours", "torch_compile", "trl", "verl")),
    ("soft64", ("ours", "torch_compile")),
    ("smoothing", ("ours", "torch_compile")),
    ("softcap", ("ours", "torch_compile")),
    ("softcap_smoothing", ("ours", "torch_compile")),
    ("kl_forward", ("floor", "ours", "torch_compile", "liger")),
    *((f"kl_{kind}", ("ours", "torch_compile", "liger")) for kind in ("reverse", "jsd")),
    *((f"kl_{kind}", ("ours",)) for kind in ("tv", "nla")),
    *((name, ("ours",)) for name in ("invariant", "invariant_log_probs")),
)
IN_FLOAT16 = ("fwd_bwd", "none", "log_probs")


class Unit(NamedTuple):
    dtype: torch.dtype
    mode: Mode
    provider: str

    def __str__(self) -> str:
        half = "" if self.dtype == torch.bfloat16 else " float16"
        return f"{self.mode.name}{half} {self.provider}"


def units_of(patterns: str) -> list[Unit]:
    chosen = set(providers.choose(patterns))
    half = [Unit(torch.float16, MODES[name], "ours") for name in IN_FLOAT16]
    units = [Unit(torch.bfloat16, MODES[name], provider) for name, those in LINES for provider in those]
    return [unit for unit in units + half if unit.provider in chosen]


def first_calls(shapes: Sequence[Shape], units: Sequence[Unit], device: torch.device, seed: int) -> None:
    """Runs in its own process. What it compiles stays on disk. A call that fails here fails again in the run,
    which records the reason.
    """
    one_compilation_per_shape()
    for shape in shapes:
        for dtype in dict.fromkeys(unit.dtype for unit in units):
            problem = make_problem(shape, dtype=dtype, device=device, seed=seed)
            for unit in units:
                if unit.dtype == dtype:
                    prepare(problem, unit.mode)
                    try:
                        providers.provide(unit.provider, problem, unit.mode)()
                    except Exception as error:
                        say(f"{shape} {unit}: {reason_of(error)}")
                    problem.clear_gradients()
                    if device.type == "cuda":  # frees GPU memory for the other processes
                        torch.cuda.empty_cache()


def compile_first(shapes: Sequence[Shape], units: Sequence[Unit], device: torch.device, options) -> None:
    compiled = [unit for unit in units if unit.provider != "floor"]
    shares = [compiled[first :: options.processes] for first in range(options.processes)]
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(first_calls, shapes, device=device, seed=options.seed), shares))


def measure(
    shape: Shape, units: Sequence[Unit], device: torch.device, here: Environment, options: argparse.Namespace
) -> list[Row]:
    rows: dict[str, Row] = {}
    steps, problems, reference, of_loss = {}, {}, None, None
    for dtype, name in dict.fromkeys((unit.dtype, unit.mode.name) for unit in units):
        if dtype not in problems:
            problems[dtype] = make_problem(shape, dtype=dtype, device=device, seed=options.seed)
        problem, mode = problems[dtype], MODES[name]
        prepare(problem, mode)
        # metrics do not change the loss
        loss = (dtype, "fwd_bwd" if set(mode.options) == {"return_metrics"} else name)
        if loss != of_loss:
            del reference
            reference, of_loss = make_reference(problem, mode), loss
        for unit in units:
            if (unit.dtype, unit.mode) != (dtype, mode):
                continue
            row = empty_row(unit.provider, shape, mode, dtype, seed=options.seed, environment=here)
            rows[str(unit)] = row
            try:
                steps[str(unit)] = set_up(unit.provider, problem, mode, reference, row)
            except Exception as error:
                row.reason = reason_of(error)
            tidy(problem)
    del reference

    def failed(name: str, error: Exception) -> None:
        rows[name].reason = reason_of(error)
        for problem in problems.values():
            tidy(problem)

    say(f"{time.strftime('%X')} {shape}: {len(steps)} steps are set up")
    timings = time_steps(
        steps, device=device, rounds=options.rounds, ms=options.ms, seed=options.seed, on_failure=failed
    )
    valid = int(problem.valid.sum())
    for name, timing in timings.items():
        mode = MODES[rows[name].mode]
        floor = timings.get("kl_forward floor" if mode.kind else "fwd_bwd floor")
        note_time(rows[name], timing, floor, mode.tflop(shape, shape.N if mode.kind else valid))
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> Path:
    parser = command("objectives", __doc__, shapes=SHAPES, providers="*", rounds=4, ms=120.0, seed=1)
    parser.add_argument("--processes", type=int, default=10, help="that compile at a time before anything is timed")
    options = parser.parse_args(argv)
    started, device = time.time(), torch.device(options.device)
    one_compilation_per_shape()
    shapes, units = parse_shapes(options.shapes), units_of(options.providers)
    if options.processes:
        compile_first(shapes, units, device, options)
        say(f"{time.time() - started:.0f} s: compiled")
    gc.freeze()  # a garbage collection of what the imports left would take a quarter of a second in each step
    here, report = environment(device, options.commit), report_of("objectives", options)
    for shape in shapes:
        rows = measure(shape, units, device, here, options)
        report.add(rows)
        for mode in dict.fromkeys(row.mode for row in rows):
            say(f"\n{mode} {shape}\n{table([row for row in rows if row.mode == mode])}")
        say(f"{time.time() - started:.0f} s")
    return report.path


if __name__ == "__main__":
    main()
