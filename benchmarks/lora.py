"""python -m benchmarks.lora: a step of a frozen head with LoRA, forward and backward, by different ways to compute its
logits.

    ours            x W^T + h B^T, h = s x A^T, in one operator (flce::linear_cross_entropy_low_rank)
    ours_merged     linear_cross_entropy on W + s B A, which autograd differentiates
    torch_compile   F.cross_entropy of F.linear(x, W) + F.linear(h, B), compiled

The floor is the two GEMMs of the head, logits and dX, by torch.mm. Gradients are those of x, A and B. Errors are
relative to float32. peak_MiB excludes x, W and the target.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops

from .data import Problem, make_problem
from .memory import MIB, peak_bytes
from .modes import MODES, Step
from .providers import floor
from .report import Environment, Report, environment, say, table_of
from .shapes import Shape, parse_shapes
from .timing import time_steps
from .timing_arguments import timing_arguments

# N tokens, D hidden, V vocabulary, r rank

SHAPES = "4096x2048x128256,4096x4096x151936"
SCALING = 2.0
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, W, A, B and the target


@dataclass
class LoraRow(Environment):
    N: int
    D: int
    V: int
    rank: int
    dtype: str
    provider: str
    ms: float | None = None
    floor_ms: float | None = None
    x_floor: float | None = None
    spread: float | None = None
    peak_MiB: float | None = None
    err_loss: float | None = None
    err_dx: float | None = None
    err_da: float | None = None
    err_db: float | None = None
    reason: str = ""


def of_pair(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return torch.ops.flce.linear_cross_entropy_low_rank(x, weight, SCALING * F.linear(x, a), b, target)


def of_merged(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return flce_ops.linear_cross_entropy(x, weight + SCALING * (b @ a), target)


def dense(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((F.linear(x, weight) + SCALING * F.linear(F.linear(x, a), b)).float(), target)


PROVIDERS: dict[str, Loss] = {
    "ours": of_pair,
    "ours_merged": of_merged,
    "torch_compile": torch.compile(dense, dynamic=False, fullgraph=True),
}


def adapters(problem: Problem, rank: int) -> tuple[Tensor, Tensor]:
    """A and B, whose product adds a tenth of the logits' magnitude."""
    _, hidden, vocab = problem.shape
    generator = torch.Generator(device=problem.input.device).manual_seed(problem.seed + 1)
    options = {"device": problem.input.device, "generator": generator}
    a = torch.randn(rank, hidden, **options).mul_(hidden**-0.5)
    b = torch.randn(vocab, rank, **options).mul_(0.15 * rank**-0.5)
    return a.to(problem.input.dtype).requires_grad_(), b.to(problem.input.dtype).requires_grad_()


def step_of(loss: Loss, problem: Problem, pair: tuple[Tensor, Tensor]) -> Step:
    leaves = [problem.input, *pair]

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        value = loss(problem.input, problem.linear_weight, *pair, problem.target)
        value.backward()
        return value.detach()

    return step


@torch.no_grad()
def exact(problem: Problem, pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    """loss, dX, dA, dB in float32."""
    x, weight, (a, b) = problem.input.float(), problem.linear_weight.float(), (part.float() for part in pair)
    h, target, valid = SCALING * x @ a.T, problem.target, problem.valid
    loss, dx, dh, db = x.new_zeros(()), torch.empty_like(x), torch.empty_like(h), torch.zeros_like(b)
    for rows in problem.row_chunks():
        logits = x[rows] @ weight.T + h[rows] @ b.T
        own = target[rows].clamp(min=0)[:, None]
        loss += ((logits.logsumexp(-1) - logits.gather(1, own)[:, 0]) * valid[rows]).sum()
        gradient = logits.softmax(-1).scatter_add_(1, own, torch.full_like(own, -1, dtype=torch.float32))
        gradient *= (valid[rows] / valid.sum())[:, None]
        dx[rows], dh[rows] = gradient @ weight, gradient @ b
        db += gradient.T @ h[rows]
    return [loss / valid.sum(), dx + SCALING * dh @ a, SCALING * dh.T @ x, db]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.float() - truth).norm() / truth.norm())


def measure(shape: Shape, rank: int, device: torch.device, options: argparse.Namespace) -> list[LoraRow]:
    problem = make_problem(shape, dtype=getattr(torch, options.dtype), device=device, seed=options.seed)
    problem.input.requires_grad_()
    pair = adapters(problem, rank)
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, rank, options.dtype)
    rows = {name: LoraRow(*machine, name) for name in ("floor", *PROVIDERS)}
    truth = exact(problem, pair)
    steps = {"floor": floor.provide("floor", problem, MODES["lora"])}
    for name, loss in PROVIDERS.items():
        step = step_of(loss, problem, pair)
        try:
            found = [step(), *(leaf.grad for leaf in (problem.input, *pair))]
        except torch.cuda.OutOfMemoryError:
            rows[name].reason = "out of memory"
            continue
        row = rows[name]
        row.err_loss, row.err_dx, row.err_da, row.err_db = map(error, found, truth)
        steps[name] = step
        del found
    del truth
    for name, step in steps.items():
        for leaf in (problem.input, *pair):
            leaf.grad = None
        rows[name].peak_MiB = peak_bytes(step, problem) / MIB

    def failed(name: str, failure: Exception) -> None:
        rows[name].reason = type(failure).__name__

    timings = time_steps(steps, device=device, rounds=options.rounds, ms=options.ms, on_failure=failed)
    for name, timing in timings.items():
        rows[name].ms, rows[name].spread = timing
        rows[name].floor_ms = timings["floor"].ms
        rows[name].x_floor = timing.ms / timings["floor"].ms
    return list(rows.values())


def table(rows: Sequence[LoraRow]) -> str:
    columns = [("ms", 9, ".3f"), ("x_floor", 9, ".3f"), ("spread", 8, ".1%"), ("peak_MiB", 9, ".0f")]
    columns += [(name, 9, ".1e") for name in ("err_loss", "err_dx", "err_da", "err_db")]
    return table_of(rows, columns, heading="provider", width=15, name_of=lambda row: row.provider)


def main(argv: Sequence[str] | None = None) -> None:
    parser = timing_arguments("lora", __doc__, shapes=SHAPES, rounds=3, ms=300)
    parser.add_argument("--ranks", default="16,64")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    report = Report(options.out / environment(device).slug / "lora.csv")
    for shape in parse_shapes(options.shapes):
        for rank in map(int, options.ranks.split(",")):
            rows = measure(shape, rank, device, options)
            report.add(rows)
            say(f"{shape} rank {rank} {options.dtype}\n{table(rows)}")


if __name__ == "__main__":
    main()
