"""python -m benchmarks.batch_invariant: what batch_invariant=True costs, and what divergences cost beside "forward".

    loss, log_probs            linear_cross_entropy; linear_log_probs with entropies; forward and backward
    ..., batch_invariant       the same with the option, over the row above
    kl forward                 linear_kl_div(kind="forward"), forward and backward
    kl tv, kl nla              other kinds, over "forward"

All steps of a shape run in one process, a few milliseconds each, in an order that is shuffled in every round. x_before
is the median over the rounds of a step's time over its counterpart's in the same round; spread is half the distance
between the quartiles of these.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flce_ops

from .data import Problem, make_problem
from .kl_div import teacher_of
from .modes import Step
from .report import Environment, Report, environment, say, table_of
from .shapes import Shape, parse_shapes
from .timing import time_steps
from .timing_arguments import timing_arguments

# N tokens, D hidden, V vocabulary

SHAPES = "8192x4096x128256,1024x2048x32000"
BEFORE = {
    "loss, batch_invariant": "loss",
    "log_probs, batch_invariant": "log_probs",
    "kl tv": "kl forward",
    "kl nla": "kl forward",
}


@dataclass
class CostRow(Environment):
    N: int
    D: int
    V: int
    dtype: str
    step: str
    before: str
    ms: float | None = None
    x_before: float | None = None
    spread: float | None = None
    reason: str = ""


def steps_of(problem: Problem) -> dict[str, Step]:
    operands, teacher = (problem.input, problem.linear_weight), teacher_of(problem)

    def loss(invariant: bool) -> Tensor:
        return flce_ops.linear_cross_entropy(*operands, problem.target, reduction="sum", batch_invariant=invariant)

    def log_probs(invariant: bool) -> Tensor:
        found = flce_ops.linear_log_probs(*operands, problem.target, entropy=True, batch_invariant=invariant)
        return (found.log_probs * problem.cotangent + found.entropy * problem.entropy_cotangent).sum()

    def divergence(kind: str) -> Tensor:
        return flce_ops.linear_kl_div(*operands, *teacher, kind=kind)

    made: dict[str, Callable[[], Tensor]] = {
        "loss": lambda: loss(False),
        "loss, batch_invariant": lambda: loss(True),
        "log_probs": lambda: log_probs(False),
        "log_probs, batch_invariant": lambda: log_probs(True),
        **{f"kl {kind}": lambda kind=kind: divergence(kind) for kind in ("forward", "tv", "nla")},
    }

    def step_of(value: Callable[[], Tensor]) -> Step:
        def step() -> Tensor:
            problem.clear_gradients()
            found = value()
            found.backward()
            return found.detach()

        return step

    return {name: step_of(value) for name, value in made.items()}


def measure(shape: Shape, device: torch.device, options: argparse.Namespace) -> list[CostRow]:
    problem = make_problem(shape, dtype=getattr(torch, options.dtype), device=device, seed=options.seed)
    problem.input.requires_grad_()
    problem.linear_weight.requires_grad_()
    steps, here = steps_of(problem), environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, options.dtype)
    rows = {name: CostRow(*machine, name, BEFORE.get(name, "")) for name in steps}

    def failed(name: str, failure: Exception) -> None:
        rows[name].reason = type(failure).__name__

    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(options.seed)
    for _ in range(options.rounds):
        names = order.sample(list(steps), len(steps))
        one = {name: steps[name] for name in names if not rows[name].reason}
        for name, timing in time_steps(one, device=device, rounds=1, ms=options.ms, on_failure=failed).items():
            times[name].append(timing.ms)
    for name, row in rows.items():
        if row.reason:
            continue
        row.ms = statistics.median(times[name])
        if row.before and not rows[row.before].reason:
            ratios = [mine / other for mine, other in zip(times[name], times[row.before], strict=True)]
            row.x_before = statistics.median(ratios)
            if len(ratios) > 1:
                first, _, third = statistics.quantiles(ratios, n=4)
                row.spread = (third - first) / 2
    return list(rows.values())


def table(rows: Sequence[CostRow]) -> str:
    columns = [("ms", 9, ".3f"), ("x_before", 10, ".3f"), ("spread", 9, ".3f")]
    return table_of(rows, columns, heading="step", width=28, name_of=lambda row: row.step)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing_arguments("batch_invariant", __doc__, shapes=SHAPES, rounds=9, ms=150)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    report = Report(options.out / environment(device).slug / "batch_invariant.csv")
    for shape in parse_shapes(options.shapes):
        rows = measure(shape, device, options)
        report.add(rows)
        say(f"{shape} {options.dtype}\n{table(rows)}")


if __name__ == "__main__":
    main()
