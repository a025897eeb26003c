"""python -m benchmarks.overhead: the host time of a training step, without its mathematics.

On a CPU, the shape is 8 x 8 x 16, and the figures are microseconds and Python calls of a step, eager and compiled, and
of a forward without gradients. On CUDA it also measures the host's microseconds from the call of a step to its return,
at the shapes of the group "small" and at two shapes whose GEMMs take less time than the host.

`--against PATH` compares with another checkout. A machine's clock varies by more than two commits differ, so processes
of both checkouts alternate. The figure is the fastest round over all processes of a checkout, with their lower quartile
beside it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import REPOSITORY, Report, commit_of, environment, say


@dataclass
class OverheadRow:
    gpu: str  # or the CPU
    torch: str
    triton: str
    python: str
    commit: str
    device: str
    N: int
    D: int
    V: int
    dtype: str
    mode: str
    calls: int  # calls of Python functions
    us: float
    us_quartile: float
    processes: int


def figures_of(checkout: Path, cuda: bool) -> Iterator[dict]:
    """The figures of a fresh process, which imports the benchmark from here and flce_ops from `checkout`."""
    command = [sys.executable, "-m", "benchmarks.host_step", str(checkout), *(["--cuda"] if cuda else [])]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return map(json.loads, result.stdout.splitlines())


def measure(checkouts: Sequence[Path], commits: Sequence[str], *, cuda: bool, processes: int) -> list[OverheadRow]:
    """The rows of one checkout, beside those of the other."""
    found: dict[tuple, list[dict]] = defaultdict(list)
    for turn in range(processes):
        order = range(len(checkouts)) if turn % 2 == 0 else reversed(range(len(checkouts)))
        for index in order:
            for figure in figures_of(checkouts[index], cuda):
                found[(figure["device"], *figure["shape"], figure["dtype"], figure["mode"], index)].append(figure)
    here = environment(torch.device("cuda" if cuda else "cpu"), commits[0])
    python = ".".join(map(str, sys.version_info[:3]))
    rows = []
    for (*problem, index), figures in sorted(found.items(), key=lambda item: list(found).index((*item[0][:-1], 0))):
        rounds = sorted(us for figure in figures for us in figure["us"])
        machine = (here.gpu, here.torch, here.triton, python, commits[index])
        calls = min(figure["calls"] for figure in figures)
        rows.append(OverheadRow(*machine, *problem, calls, rounds[0], rounds[len(rounds) // 4], len(figures)))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout, or sources of a commit without their .git")
    parser.add_argument("--against-commit", help="its commit, where it has no .git")
    parser.add_argument("--processes", type=int, default=5, help="of each checkout, in turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="both where CUDA is, when not given")
    parser.add_argument("--out", type=Path, help="a CSV")
    options = parser.parse_args(argv)

    checkouts, commits = [REPOSITORY], [commit_of(REPOSITORY)]
    if options.against is not None:
        checkouts.insert(0, options.against.resolve())
        commits.insert(0, options.against_commit or commit_of(checkouts[0]))
    devices = [options.device] if options.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    report = Report(options.out) if options.out else None
    say(f"{'':42}{'commit':>12}{'us':>8}{'quartile':>10}{'calls':>7}")
    for device in devices:
        rows = measure(checkouts, commits, cuda=device == "cuda", processes=options.processes)
        for row in rows:
            name = f"{row.device} {row.N}x{row.D}x{row.V} {row.dtype} {row.mode}"
            say(f"{name:42}{row.commit:>12}{row.us:8.0f}{row.us_quartile:10.0f}{row.calls:7}")
        if report is not None:
            report.add(rows)


if __name__ == "__main__":
    main()
