"""python -m benchmarks.support: a step over the classes that each token was sampled from, beside the exact step.

    policy, log_probs       linear_policy_loss, and linear_log_probs with entropies, over all classes
    ..., ragged             the same over a support, as ids and offsets
    ..., padded             as ids (N, K), where K is the largest support
    ..., one in 16 without  ragged, and every 16th token has no ids: all classes

Supports are the likeliest classes of a token and its target. Their sizes are drawn around a mean; a few are ten times
that. x_exact is a step's time over that of the exact step of the same function and run. beyond_MiB is the peak less the
gradients. Errors are those of log-probabilities against float64, of 256 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flce_ops

from .data import IGNORE_INDEX, Problem, make_problem
from .memory import MIB, peak_bytes
from .modes import Step
from .report import Environment, Report, environment, say, table_of
from .shapes import Shape, parse_shapes
from .timing import time_steps
from .timing_arguments import timing_arguments

# N tokens, K ids of each, E ids of all, D hidden, V vocabulary

SHAPES = "8192x4096x128256,4096x2048x151936"
MEAN, LARGEST = 80, 10  # ids of a token, and how many times that at most
SPREAD = 0.8  # of the logarithm of sizes
WITHOUT = 16  # every so many tokens have no ids
CHECKED = 256  # tokens
Support = Tensor | tuple[Tensor, Tensor] | None


@dataclass
class SupportRow(Environment):
    N: int
    D: int
    V: int
    dtype: str
    function: str
    support: str
    mean_ids: float | None = None
    ms: float | None = None
    x_exact: float | None = None
    spread: float | None = None
    peak_MiB: float | None = None
    beyond_MiB: float | None = None
    err_log_probs: float | None = None
    reason: str = ""


def draw_ids(problem: Problem, mean: int) -> Tensor:  # (N, K), padded with -1
    tokens, _, classes = problem.shape
    device = problem.input.device
    generator = torch.Generator(device).manual_seed(problem.seed + 2)
    sizes = (SPREAD * torch.randn(tokens, generator=generator, device=device)).exp()
    sizes = (sizes * (mean / sizes.mean())).round().clamp(1, min(mean * LARGEST, classes)).long()
    sizes[problem.target == IGNORE_INDEX] = 0
    most = int(sizes.max())
    ids = torch.empty(tokens, most, dtype=torch.int64, device=device)
    for rows in problem.row_chunks():
        ids[rows] = (problem.input[rows] @ problem.linear_weight.T).topk(most, 1).indices
    target = problem.target[:, None]
    ids[:, :1] = torch.where((ids[:, :1] == target) | (target < 0), ids[:, :1], target)
    return ids.masked_fill(torch.arange(most, device=device) >= sizes[:, None], -1)


def ragged(ids: Tensor) -> tuple[Tensor, Tensor]:  # (E,), (N + 1,)
    lengths = (ids >= 0).sum(1)
    return ids[ids >= 0], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def supports(ids: Tensor) -> dict[str, tuple[Support, Tensor]]:
    """Each support, and its ids (N, K)."""
    some = ids.clone()
    some[::WITHOUT] = -1
    of_all: dict[str, Support] = {"": None, "ragged": ragged(ids), "padded": ids}
    of_some = {f"one in {WITHOUT} without": (ragged(some), some)}
    return {kind: (support, ids) for kind, support in of_all.items()} | of_some


def policy_step(problem: Problem, support: Support) -> Step:
    tokens = problem.shape.N
    advantages = problem.cotangent.sign()
    old = torch.full((tokens,), -2.0, device=problem.input.device)
    return step_of(
        problem,
        lambda: (
            flce_ops.linear_policy_loss(
                problem.input, problem.linear_weight, problem.target, advantages, old, support=support
            ).loss
        ),
    )


def log_probs_step(problem: Problem, support: Support) -> Step:
    def loss() -> Tensor:
        operands = problem.input, problem.linear_weight, problem.target
        found = flce_ops.linear_log_probs(*operands, support=support, entropy=True)
        return (found.log_probs * problem.cotangent + found.entropy * problem.entropy_cotangent).sum()

    return step_of(problem, loss)


def step_of(problem: Problem, loss: Callable[[], Tensor]) -> Step:
    def step() -> Tensor:
        problem.clear_gradients()
        value = loss()
        value.backward()
        return value.detach()

    return step


FUNCTIONS = {"policy": policy_step, "log_probs": log_probs_step}


@torch.no_grad()
def error_of(problem: Problem, support: Support, ids: Tensor) -> float:
    """Of the first tokens that count; `ids` are those of the support, padded."""
    rows = problem.valid.nonzero().squeeze(1)[:CHECKED]
    operands = problem.input, problem.linear_weight, problem.target
    found = flce_ops.linear_log_probs(*operands, support=support).log_probs[rows]
    logits = problem.input[rows].double() @ problem.linear_weight.double().T
    if support is not None:
        inside = torch.zeros(len(rows), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
        own = torch.where(ids[rows] < 0, logits.shape[1], ids[rows])
        inside = inside.scatter(1, own, True)[:, :-1]
        logits.masked_fill_(~(inside | ~inside.any(1, keepdim=True)), -torch.inf)
    truth = logits.log_softmax(1).gather(1, problem.target[rows, None]).squeeze(1)
    return float((found - truth).norm() / truth.norm())


def measure(shape: Shape, device: torch.device, options: argparse.Namespace) -> list[SupportRow]:
    dtype = getattr(torch, options.dtype)
    problem = make_problem(shape, dtype=dtype, device=device, seed=options.seed)
    problem.input.requires_grad_()
    problem.linear_weight.requires_grad_()
    with torch.no_grad():
        ids = draw_ids(problem, options.mean)
    here = environment(device, options.commit)
    machine: tuple[Any, ...] = (here.gpu, here.torch, here.triton, here.commit, *shape, options.dtype)
    gradients = dtype.itemsize * shape.D * (shape.N + shape.V)
    rows, steps = {}, {}
    for function, make in FUNCTIONS.items():
        for kind, (support, own) in supports(ids).items():
            name = f"{function}, {kind}" if kind else function
            row = rows[name] = SupportRow(*machine, function, kind)
            row.mean_ids = float((own >= 0).sum() / problem.valid.sum()) if kind else None
            row.err_log_probs = error_of(problem, support, own)
            steps[name] = make(problem, support)
            steps[name]()
            row.peak_MiB = peak_bytes(steps[name], problem) / MIB
            row.beyond_MiB = row.peak_MiB - gradients / MIB

    def failed(name: str, failure: Exception) -> None:
        rows[name].reason = type(failure).__name__

    timings = time_steps(steps, device=device, rounds=options.rounds, ms=options.ms, on_failure=failed)
    for name, timing in timings.items():
        rows[name].ms, rows[name].spread = timing
        if rows[name].function in timings:
            rows[name].x_exact = timing.ms / timings[rows[name].function].ms
    return list(rows.values())


def table(rows: Sequence[SupportRow]) -> str:
    columns = [("ms", 9, ".3f"), ("x_exact", 9, ".3f"), ("spread", 8, ".1%"), ("mean_ids", 10, ".1f")]
    columns += [("peak_MiB", 10, ".0f"), ("beyond_MiB", 12, ".0f"), ("err_log_probs", 15, ".1e")]
    return table_of(
        rows, columns, heading="step", width=32, name_of=lambda row: f"{row.function}, {row.support}".strip(", ")
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing_arguments("support", __doc__, shapes=SHAPES, rounds=3, ms=300)
    parser.add_argument("--mean", type=int, default=MEAN, help="ids of a token")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    report = Report(options.out / environment(device).slug / "support.csv")
    for shape in parse_shapes(options.shapes):
        rows = measure(shape, device, options)
        report.add(rows)
        say(f"{shape} {options.dtype}\n{table(rows)}")


if __name__ == "__main__":
    main()
