"""python -m benchmarks.metrics: a step of linear_cross_entropy, forward and backward, with each metric beside the loss.

The rows of one shape and reduction are timed in turn; `x_without` is a row's time over that of the loss alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import flce_ops
from flce_ops.entry.metrics import NAMES

from .data import Problem, make_problem
from .memory import MIB, peak_bytes
from .modes import Step
from .report import Environment, Report, environment, say
from .shapes import Shape, parse_shapes
from .timing import time_steps

# N tokens, D hidden, V vocabulary

SHAPES = "4096x4096x151936,8192x2048x128256,2048x512x32000"
WITHOUT, ALL = "without", "all"


@dataclass
class MetricsRow(Environment):
    N: int
    D: int
    V: int
    dtype: str
    reduction: str
    softcap: float | None
    metric: str
    ms: float | None = None
    spread: float | None = None
    x_without: float | None = None
    peak_MiB: float | None = None
    reason: str = ""


def step_of(problem: Problem, metric: str, reduction: str, softcap: float | None) -> Step:
    names = {WITHOUT: False, ALL: NAMES}.get(metric, (metric,))

    def step() -> torch.Tensor:
        problem.clear_gradients()
        result = flce_ops.linear_cross_entropy(
            *(problem.input, problem.linear_weight, problem.target),
            reduction=reduction,
            softcap=softcap,
            z_loss=1e-4,
            return_metrics=names,
        )
        loss = result if names is False else result[0]
        loss.backward(problem.cotangent if reduction == "none" else None)
        return loss.detach()

    return step


def measure(shape: Shape, reduction: str, device: torch.device, options: argparse.Namespace) -> list[MetricsRow]:
    problem = make_problem(shape, dtype=getattr(torch, options.dtype), device=device, seed=options.seed)
    for operand in (problem.input, problem.linear_weight):
        operand.requires_grad_()
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, options.dtype, reduction, options.softcap)
    rows = {metric: MetricsRow(*machine, metric) for metric in (WITHOUT, *NAMES, ALL)}
    steps = {metric: step_of(problem, metric, reduction, options.softcap) for metric in rows}
    for metric, step in steps.items():
        step()
        rows[metric].peak_MiB = peak_bytes(step, problem) / MIB

    def failed(metric: str, failure: Exception) -> None:
        rows[metric].reason = type(failure).__name__

    timings = time_steps(dict(steps), device=device, rounds=options.rounds, ms=options.ms, on_failure=failed)
    for metric, timing in timings.items():
        rows[metric].ms, rows[metric].spread = timing
        if WITHOUT in timings:
            rows[metric].x_without = timing.ms / timings[WITHOUT].ms
    return list(rows.values())


def table(rows: Sequence[MetricsRow]) -> str:
    lines = [f"{'metric':18}{'ms':>9}{'+-':>7}{'x without':>11}{'MiB':>8}"]
    for row in rows:
        cells = [(row.ms, "9.3f"), (row.spread, "7.1%"), (row.x_without, "11.3f"), (row.peak_MiB, "8.0f")]
        text = "".join("" if value is None else f"{value:{form}}" for value, form in cells)
        lines.append(f"{row.metric:18}{text}  {row.reason}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.metrics", description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help="NxDxV, with commas")
    parser.add_argument("--reductions", default="mean,none")
    parser.add_argument("--softcap", type=float, default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=200, help="back-to-back time of a step in a round")
    parser.add_argument("--seed", type=int, default=1, help="of the data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    report = Report(options.out / environment(device).slug / "metrics.csv")
    for shape in parse_shapes(options.shapes):
        for reduction in options.reductions.split(","):
            rows = measure(shape, reduction, device, options)
            report.add(rows)
            say(f"{shape} {options.dtype} {reduction}\n{table(rows)}")


if __name__ == "__main__":
    main()
