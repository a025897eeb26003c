"""python -m benchmarks.main_grad: gradients of a head over 8 micro-batches, by different ways to add those of
linear_weight.

    autograd            into .grad, in the weight's dtype
    autograd_float32    .grad of each micro-batch is added to a float32 buffer
    main_grad           the GEMM adds to the float32 buffer; a second variant saves no logits

peak_MiB excludes only the input and the weight: it includes the buffer, or .grad. err_dw is relative to float64.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import flce_ops

from .data import Problem, make_problem
from .memory import MIB, peak_bytes
from .report import Environment, Report, environment, say
from .shapes import Shape
from .timing import time_steps

# N tokens of a micro-batch, D hidden, V vocabulary

SHAPES = (Shape(2048, 4096, 128256), Shape(1024, 4096, 128256))
MICRO_BATCHES = 8
# runs forward and backward for input, linear_weight, target
LossOfMicroBatch = Callable[[Tensor, Tensor, Tensor], None]


@dataclass
class MainGradRow(Environment):
    N: int
    D: int
    V: int
    micro_batches: int
    dtype: str
    provider: str
    ms: float | None = None  # over all micro-batches
    spread: float | None = None
    peak_MiB: float | None = None
    err_dw: float | None = None


class Accumulation:
    """The gradients of one provider. `held` has those of linear_weight if they are not in its .grad."""

    def __init__(self, provider: str, problem: Problem) -> None:
        self.weight = problem.linear_weight.detach().requires_grad_()
        tokens = len(problem.target) // MICRO_BATCHES
        inputs = [input.detach().requires_grad_() for input in problem.input.split(tokens)]
        self.batches = list(zip(inputs, problem.target.split(tokens)))
        self.provider, self.normalizer = provider, problem.valid.sum()
        self.held: Tensor | None = None

    def step(self) -> Tensor:
        """Starts from a buffer of zeros, as at the start of an optimizer step."""
        if self.held is not None:
            self.held.zero_()
        elif self.provider != "autograd":
            self.held = torch.zeros_like(self.weight, dtype=torch.float32)
        self.weight.grad = None
        retained = {"retained": 0} if self.provider == "main_grad_retaining_none" else {}
        with flce_ops.workspace(flce_ops.get_workspace(), **retained):
            for input, target in self.batches:
                self.add(input, target)
        return self.weight.grad if self.held is None else self.held

    def add(self, input: Tensor, target: Tensor) -> None:
        input.grad = None
        options = {"main_grad": self.held} if self.provider.startswith("main_grad") else {}
        flce_ops.linear_cross_entropy(input, self.weight, target, normalizer=self.normalizer, **options).backward()
        if self.provider == "autograd_float32":
            self.held += self.weight.grad
            self.weight.grad = None

    def free(self) -> None:
        self.held = self.weight.grad = None
        for input, _ in self.batches:
            input.grad = None


PROVIDERS = ("autograd", "autograd_float32", "main_grad", "main_grad_retaining_none")


def exact_gradient(problem: Problem) -> Tensor:  # (V, D) float64
    weight = problem.linear_weight.double()
    total = torch.zeros_like(weight)
    for rows in range(0, len(problem.target), 256):
        input, target = problem.input[rows : rows + 256].double(), problem.target[rows : rows + 256]
        gradient = (input @ weight.T).softmax(1)
        gradient[torch.arange(len(target), device=target.device), target.clamp(min=0)] -= 1.0
        gradient *= ((target >= 0) / problem.valid.sum())[:, None]
        total.addmm_(gradient.T, input)
    return total


def error(found: Tensor, exact: Tensor) -> float:
    """The relative error, computed one block of rows at a time."""
    squares = sum(float((f.double() - e).square().sum()) for f, e in zip(found.split(4096), exact.split(4096)))
    return (squares / float(sum(e.square().sum() for e in exact.split(4096)))) ** 0.5


def measure(shape: Shape, device: torch.device, options: argparse.Namespace) -> list[MainGradRow]:
    here = environment(device, options.commit)
    dtype, everything = getattr(torch, options.dtype), shape._replace(N=MICRO_BATCHES * shape.N)
    problem = make_problem(everything, dtype=dtype, device=device, seed=0)
    ways = {provider: Accumulation(provider, problem) for provider in options.providers.split(",")}
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, MICRO_BATCHES, options.dtype)
    rows = {provider: MainGradRow(*machine, provider) for provider in ways}
    exact = exact_gradient(problem)
    for provider, way in ways.items():
        rows[provider].err_dw = error(way.step(), exact)
        way.free()
    del exact
    for provider, way in ways.items():
        rows[provider].peak_MiB = peak_bytes(way.step, problem) / MIB
        way.free()

    def failed(provider: str, failure: Exception) -> None:
        raise failure

    steps = {provider: way.step for provider, way in ways.items()}
    timings = time_steps(steps, device=device, rounds=options.rounds, ms=options.ms, on_failure=failed)
    for provider, timing in timings.items():
        rows[provider].ms, rows[provider].spread = timing
    return list(rows.values())


def table(rows: Sequence[MainGradRow]) -> str:
    lines = [f"{'provider':26}{'ms':>9}{'+-':>7}{'MiB':>8}{'err dw':>10}"]
    lines += [f"{r.provider:26}{r.ms:9.2f}{r.spread:7.1%}{r.peak_MiB:8.0f}{r.err_dw:10.1e}" for r in rows]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.main_grad", description=__doc__)
    parser.add_argument("--shapes", default="", help="NxDxV of a micro-batch, with commas")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=800, help="back-to-back time of a provider in a round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    shapes = [Shape(*map(int, text.split("x"))) for text in options.shapes.split(",")] if options.shapes else SHAPES
    report = Report(options.out / environment(device).slug / "main_grad.csv")
    for shape in shapes:
        rows = measure(shape, device, options)
        report.add(rows)
        say(f"{MICRO_BATCHES} x {shape} {options.dtype}\n{table(rows)}")


if __name__ == "__main__":
    main()
