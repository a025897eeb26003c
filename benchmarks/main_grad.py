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

import torch
from torch import Tensor

import flce_ops

from .command import command, report_of
from .data import Problem, make_problem
from .errors import distance, make_reference
from .memory import MIB, peak_bytes
from .modes import MODES
from .report import Environment, environment, say, table_of
from .shapes import Shape, parse_shapes
from .timing import time_steps

# N tokens of a micro-batch, D hidden, V vocabulary

SHAPES = "2048x4096x128256,1024x4096x128256"
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


def measure(shape: Shape, device: torch.device, options: argparse.Namespace) -> list[MainGradRow]:
    here = environment(device, options.commit)
    dtype, everything = getattr(torch, options.dtype), shape._replace(N=MICRO_BATCHES * shape.N)
    problem = make_problem(everything, dtype=dtype, device=device, seed=0)
    ways = {provider: Accumulation(provider, problem) for provider in options.providers.split(",")}
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, MICRO_BATCHES, options.dtype)
    rows = {provider: MainGradRow(*machine, provider) for provider in ways}
    exact = make_reference(problem, MODES["fwd_bwd"]).grad_weight
    for provider, way in ways.items():
        rows[provider].err_dw = distance(way.step(), exact)
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
    columns = [("ms", 9, ".2f"), ("spread", 8, ".1%"), ("peak_MiB", 10, ".0f"), ("err_dw", 10, ".1e")]
    return table_of(rows, columns, heading="provider", width=26, name_of=lambda row: row.provider)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("main_grad", __doc__, shapes=SHAPES, dtype="bfloat16", rounds=3, ms=800.0)
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    options = parser.parse_args(argv)
    device, report = torch.device(options.device), report_of("main_grad", options)
    for shape in parse_shapes(options.shapes):
        rows = measure(shape, device, options)
        report.add(rows)
        say(f"{MICRO_BATCHES} x {shape} {options.dtype}\n{table(rows)}")


if __name__ == "__main__":
    main()
