"""python -m benchmarks.paired --against PATH: steps of this checkout over those of another one, in one run.

A card's clock differs by 5 % between runs, so two commits are compared in alternation: a process of each checkout stays
alive with the same steps in steady state, and in every round both time every step, in an order that is shuffled. Only
one process works at a time. x_against is the median over the rounds of this checkout's time over the other's in the
same round; spread is half the distance between the quartiles of these.

    python -m benchmarks.paired --against ../other                                     # the loads of loads.py, 150 s
    python -m benchmarks.paired --against ../other --shapes 8192x4096x128256 --modes log_probs

The modes are those of `python -m benchmarks`; log_probs has entropies. Before anything is timed, --processes processes
of both checkouts take every step once, so that their kernels are compiled on disk. Rows go to results/GPU/paired.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import loads
from .command import command
from .data import IGNORED, PRIORS
from .report import REPOSITORY, Environment, Report, commit_of, environment, reason_of, say, table_of
from .shapes import Shape, parse_shapes

# N tokens, D hidden, V vocabulary


class Unit(NamedTuple):
    mode: str
    shape: tuple[int, int, int]
    ignored: float = IGNORED
    prior: str = PRIORS[0]
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        ignored = "" if self.ignored == IGNORED else f" ({self.ignored:.0%} ignored)"
        return f"{self.mode} {Shape(*self.shape)}{ignored}{'' if self.prior == PRIORS[0] else ' ' + self.prior}"


@dataclass
class PairedRow(Environment):  # `commit` is this checkout's
    against: str  # the other's commit
    N: int
    D: int
    V: int
    ignored: float
    prior: str
    dtype: str
    mode: str
    rounds: int
    ms: float | None = None
    against_ms: float | None = None
    x_against: float | None = None
    spread: float | None = None
    reason: str = ""


def units_of(options: argparse.Namespace) -> list[Unit]:
    modes = options.modes.split(",")
    if options.shapes:
        pairs = [(shape, IGNORED, PRIORS[0]) for shape in parse_shapes(options.shapes)]
    else:
        every = [unit for unit in loads.units() if "ours" in unit.providers.split(",")]
        pairs = list(dict.fromkeys((unit.shape, unit.ignored, unit.prior) for unit in every))
    # loads.py has shares and priors for the loss only
    usual = [pair for pair in pairs if pair[1:] == (IGNORED, PRIORS[0])]
    return [
        Unit(mode, tuple(shape), ignored, prior, options.dtype)
        for mode in modes
        for shape, ignored, prior in (pairs if mode == "fwd_bwd" or options.shapes else usual[: options.others])
    ]


# ---------------------------------------------------------------- a process of one checkout


def serve(checkout: Path, device: torch.device) -> None:
    """Answers a line of JSON on stdin by one on stdout. flce_ops comes from `checkout`, the benchmark from here."""
    sys.path.insert(0, str(checkout))
    import flce_ops

    assert Path(flce_ops.__file__).parent.parent == checkout, (flce_ops.__file__, checkout)
    from .data import make_problem
    from .modes import MODES, prepare
    from .providers import provide
    from .timing import synchronize, time_steps

    if device.type == "cpu":
        torch.set_num_threads(1)

    def failed(_: str, failure: Exception) -> None:
        raise failure

    step: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "unit" in request:
                step = None
                unit = Unit(*request["unit"])
                of_data = {"ignored": unit.ignored, "prior": unit.prior, "seed": request["seed"]}
                problem = make_problem(Shape(*unit.shape), dtype=getattr(torch, unit.dtype), device=device, **of_data)
                prepare(problem, MODES[unit.mode])
                step = provide("ours", problem, MODES[unit.mode])
                for _ in range(request["calls"]):
                    step()
                synchronize(device)
            elif "ms" in request:
                timed = time_steps({"": step}, device=device, rounds=1, ms=request["ms"], on_failure=failed)
                answer["ms"] = timed[""].ms
            else:
                step = problem = None  # frees the memory of a step
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        except Exception as error:
            answer["reason"] = reason_of(error)
        print(json.dumps(answer), flush=True)


class Process:
    """A process that serves one checkout."""

    def __init__(self, checkout: Path, device: str) -> None:
        command = [sys.executable, "-m", "benchmarks.paired", "--serve", str(checkout), "--device", device]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=REPOSITORY, env=environ, stdin=pipe, stdout=pipe, text=True)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        return json.loads(answer) if answer else {"reason": "the process has ended"}

    def close(self) -> None:
        self.process.communicate()  # closes stdin, which ends the loop


# ---------------------------------------------------------------- both


def compile_first(checkouts: Sequence[Path], units: Sequence[Unit], options: argparse.Namespace) -> None:
    """Half of the processes belong to each checkout."""
    each = max(1, options.processes // 2)
    shares = [(checkout, units[first::each]) for checkout in checkouts for first in range(min(each, len(units)))]

    def run(share: tuple[Path, Sequence[Unit]]) -> None:
        process = Process(share[0], options.device)
        for unit in share[1]:
            process.ask(unit=unit, seed=options.seed, calls=1)
            process.ask()
        process.close()

    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(run, shares))


def measure(
    unit: Unit, pair: Sequence[Process], row: PairedRow, options: argparse.Namespace, shuffle: random.Random
) -> PairedRow:
    """`pair` is (the other, this)."""
    for process in pair:
        row.reason = row.reason or process.ask(unit=unit, seed=options.seed, calls=4).get("reason", "")
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(0 if row.reason else options.rounds):
        for which in shuffle.sample((0, 1), 2):
            answer = pair[which].ask(ms=options.ms)
            row.reason = row.reason or answer.get("reason", "")
            times[which].append(answer.get("ms", 0.0))
    for process in pair:
        process.ask()
    if row.reason:
        return row
    row.against_ms, row.ms = map(statistics.median, times)
    ratios = [mine / other for other, mine in zip(*times, strict=True)]
    row.x_against = statistics.median(ratios)
    if len(ratios) > 1:
        first, _, third = statistics.quantiles(ratios, n=4)
        row.spread = (third - first) / 2
    return row


def table(rows: Sequence[PairedRow]) -> str:
    columns = [("against_ms", 12, ".3f"), ("ms", 9, ".3f"), ("x_against", 11, ".4f"), ("spread", 9, ".4f")]

    units = {id(row): str(Unit(row.mode, (row.N, row.D, row.V), row.ignored, row.prior)) for row in rows}
    return table_of(rows, columns, heading="step", width=44, name_of=lambda row: units[id(row)])


def main(argv: Sequence[str] | None = None) -> Path | None:
    parser = command("paired", __doc__, shapes="", dtype="bfloat16", rounds=7, ms=100.0, seed=1)
    parser.add_argument("--against", type=Path, help="another checkout, or sources of a commit without their .git")
    parser.add_argument("--against-commit", help="its commit, where it has no .git")
    parser.add_argument("--modes", default="log_probs,fwd_bwd")
    parser.add_argument("--others", type=int, default=4, help="how many shapes the modes beside fwd_bwd take")
    parser.add_argument("--processes", type=int, default=12, help="that compile before anything is timed; 0: none")
    parser.add_argument("--budget-s", type=float, help="start no step after so many seconds")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve is not None:
        serve(options.serve, torch.device(options.device))
        return None
    if options.against is None:
        parser.error("expected --against PATH")

    began, device = time.time(), torch.device(options.device)
    checkouts = [options.against.resolve(), REPOSITORY]
    against = options.against_commit or commit_of(checkouts[0])
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, against)
    units, left_out = units_of(options), []
    if options.processes:
        compile_first(checkouts, units, options)
        say(f"{time.time() - began:.0f} s: compiled")
    report, rows = Report(options.out / here.slug / "paired.csv"), []
    pair, shuffle = [Process(checkout, options.device) for checkout in checkouts], random.Random(options.seed)
    for unit in units:
        if options.budget_s is not None and time.time() - began > options.budget_s:
            left_out.append(str(unit))
            continue
        row = PairedRow(*machine, *unit.shape, unit.ignored, unit.prior, unit.dtype, unit.mode, options.rounds)
        rows.append(measure(unit, pair, row, options, shuffle))
        report.add(rows[-1:])
        say(table(rows[-1:]).splitlines()[-1])
    for process in pair:
        process.close()
    say(f"\n{here.commit} over {against}, {time.time() - began:.0f} s\n{table(rows)}")
    if left_out:
        say("left out: " + ", ".join(left_out))
    return report.path


if __name__ == "__main__":
    main()
