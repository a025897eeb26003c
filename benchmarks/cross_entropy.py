"""python -m benchmarks.cross_entropy: forward and backward of the loss of given logits, and the bandwidth they reach.

GB/s counts the bytes that any implementation must move: one read of the rows that are not ignored, and one write of a
gradient of all rows. `share` is GB/s relative to that of `copy`, a clone of the logits, which does nothing else. ms is
the GPU's time, with the host ahead as in a training step (--ahead-ms). host us is the time to launch a step.

Providers that overwrite the logits get a copy of their own. From their first timed step on, they read their own
gradients instead of logits. The errors are measured on random logits.
"""

import argparse
import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops

from .memory import MIB, peak_bytes_cuda
from .report import Environment, Report, environment, say
from .timing import time_steps

# N tokens, V vocabulary

SHAPES = (  # the CSV is complete after each shape
    (8192, 128256, "bfloat16"),  # Llama 3; a row does not fit the registers of a multiprocessor
    (8192, 32000, "bfloat16"),
    (16384, 50304, "bfloat16"),
    (16384, 32000, "float32"),
    (4096, 151936, "bfloat16"),  # Qwen
    (2048, 32000, "bfloat16"),
    (8192, 128256, "float32"),
    (4096, 50257, "bfloat16"),  # GPT-2: rows start at any alignment
)
CHECKED_ROWS = 256  # rows of the gradient that are checked; the loss is checked over all rows
Step = Callable[[], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LogitsRow(Environment):
    N: int
    V: int
    ignored: float
    dtype: str
    provider: str
    version: str
    ms: float | None = None
    spread: float | None = None
    host_us: float | None = None  # until all launches of a step are queued
    GBps: float | None = None
    share: float | None = None  # relative to a copy
    peak_MiB: float | None = None  # beyond the logits
    err_loss: float | None = None
    err_grad: float | None = None
    reason: str = ""


class Made(torch.autograd.Function):
    """Returns the logits as the result of an operation, in their own memory, so that they may be overwritten."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=logits.dtype, device=logits.device)
        return alias.set_(logits.untyped_storage(), logits.storage_offset(), logits.shape, logits.stride())

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def liger() -> Loss:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # the arguments after the target: weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss
    options = (None, -100, 0.0, 0.0, "mean", None, False)
    return lambda logits, target: LigerCrossEntropyFunction.apply(logits, target, *options)[0]


def quack(inplace_backward: bool) -> Loss:
    from quack.cross_entropy import cross_entropy  # the distribution quack-kernels, with its nvidia-cutlass-dsl

    return lambda logits, target: cross_entropy(logits, target, inplace_backward=inplace_backward)


# name: (distribution, whether it overwrites the logits, function that makes the loss)
PROVIDERS: dict[str, tuple[str, bool, Callable[[], Loss]]] = {
    "ours": ("flce_ops", False, lambda: flce_ops.cross_entropy),
    "ours_in_place": (
        "flce_ops",
        True,
        lambda: lambda logits, target: flce_ops.cross_entropy(logits, target, inplace_backward=True),
    ),
    "torch_eager": ("torch", False, lambda: F.cross_entropy),
    "torch_compile": ("torch", False, lambda: torch.compile(F.cross_entropy, dynamic=False)),
    "liger": ("liger_kernel", True, liger),
    "quack": ("quack_kernels", False, lambda: quack(False)),
    "quack_in_place": ("quack_kernels", True, lambda: quack(True)),
}


def make_problem(tokens: int, classes: int, dtype: str, ignored: float, device: torch.device) -> tuple[Tensor, Tensor]:
    logits = torch.empty(tokens, classes, dtype=getattr(torch, dtype), device=device)
    for rows in logits.split(1024):
        rows.copy_(2.0 * torch.randn(rows.shape, device=device))
    target = torch.randint(classes, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < ignored] = -100
    return logits.requires_grad_(), target


def step_of(loss: Loss, logits: Tensor, target: Tensor) -> Step:
    def step() -> Tensor:
        (grad,) = torch.autograd.grad(loss(Made.apply(logits), target), logits)
        return grad

    return step


class Truth(NamedTuple):
    loss: float
    grad: Tensor  # (CHECKED_ROWS, V) float64


def truth_of(logits: Tensor, target: Tensor) -> Truth:
    """The exact results in float64, a few rows at a time."""
    count, total = int((target >= 0).sum()), 0.0
    for rows, targets in zip(logits.detach().split(CHECKED_ROWS), target.split(CHECKED_ROWS)):
        total += float(F.cross_entropy(rows.double(), targets, reduction="sum"))
    exact = logits.detach()[:CHECKED_ROWS].double().requires_grad_()
    part = F.cross_entropy(exact, target[:CHECKED_ROWS], reduction="sum") / count
    return Truth(total / count, torch.autograd.grad(part, exact)[0])


def errors(loss: Loss, logits: Tensor, target: Tensor, truth: Truth) -> tuple[float, float]:
    """The relative errors of the loss and of the gradient."""
    value = loss(Made.apply(logits), target)
    (grad,) = torch.autograd.grad(value, logits)
    difference = grad[:CHECKED_ROWS].double() - truth.grad
    of_grad = difference.square().sum() / truth.grad.square().sum()
    return abs(float(value.detach()) - truth.loss) / abs(truth.loss), float(of_grad.sqrt())


def measure(
    shape: tuple[int, int, str], ignored: float, device: torch.device, names: Sequence[str], options: argparse.Namespace
) -> list[LogitsRow]:
    tokens, classes, dtype = shape
    logits, target = make_problem(tokens, classes, dtype, ignored, device)
    truth, given = truth_of(logits, target), logits.detach().clone()
    torch.compiler.reset()  # after its limit of shapes, torch.compile would run eagerly
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, tokens, classes, ignored, dtype)
    rows = {"copy": LogitsRow(*machine, "copy", torch.__version__)}
    steps: dict[str, Step] = {"copy": lambda: logits.detach().clone()}
    for name in names:
        distribution, _, make = PROVIDERS[name]
        rows[name] = row = LogitsRow(*machine, name, version_of(distribution))
        try:
            loss = make()
            row.err_loss, row.err_grad = errors(loss, logits, target, truth)
            steps[name] = step = step_of(loss, logits, target)
            row.peak_MiB = peak_of(step, device)
        except ImportError as failure:
            row.reason = f"not installed: {failure.name}"
        except Exception as failure:  # raised by a provider
            row.reason = reason_of(failure)
        with torch.no_grad():
            logits.copy_(given)  # some providers have overwritten them
    del given

    def failed(name: str, failure: Exception) -> None:
        rows[name].reason = type(failure).__name__

    timings = time_steps(
        steps, device=device, rounds=options.rounds, ms=options.ms, ahead_ms=options.ahead_ms, on_failure=failed
    )
    valid = int((target >= 0).sum())
    moved = (valid + tokens) * classes * logits.element_size()
    for name, timing in timings.items():
        row = rows[name]
        row.ms, row.spread = timing
        row.host_us = host_us(steps[name], device)
        row.GBps = (2 * logits.nbytes if name == "copy" else moved) / timing.ms / 1e6
    for name in timings:
        rows[name].share = rows[name].GBps / rows["copy"].GBps
    return list(rows.values())


def host_us(step: Step, device: torch.device) -> float:
    """The fastest of a few measurements, because other work on the machine only adds time."""
    times = []
    for _ in range(20):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
    return min(times)


def version_of(distribution: str) -> str:
    if distribution == "flce_ops":
        return flce_ops.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def peak_of(step: Step, device: torch.device) -> float | None:
    return peak_bytes_cuda(step) / MIB if device.type == "cuda" else None


def reason_of(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).splitlines()[0][:120] if str(failure) else ''}"


def table(rows: Sequence[LogitsRow]) -> str:
    headings = (("ms", 9), ("+-", 7), ("host us", 9), ("GB/s", 8), ("share", 8), ("MiB", 8), ("err loss", 10))
    lines = ["provider".ljust(16) + "".join(name.rjust(width) for name, width in (*headings, ("err grad", 10)))]
    for row in sorted(rows, key=lambda row: (row.ms is None, row.ms)):
        cells = [(row.ms, "9.3f"), (row.spread, "7.1%"), (row.host_us, "9.0f"), (row.GBps, "8.0f")]
        cells += [(row.share, "8.1%"), (row.peak_MiB, "8.0f"), (row.err_loss, "10.1e"), (row.err_grad, "10.1e")]
        text = "".join(
            f"{value:{form}}" if value is not None else " " * int(form.split(".")[0]) for value, form in cells
        )
        lines.append(f"{row.provider:16}{text}  {row.reason}".rstrip())
    return "\n".join(lines)


def parse_shape(text: str) -> tuple[int, int, str]:
    size, _, dtype = text.partition(":")
    tokens, classes = size.split("x")
    return int(tokens), int(classes), dtype or "bfloat16"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.cross_entropy", description=__doc__)
    parser.add_argument("--shapes", default="", help="NxV or NxV:dtype, with commas")
    parser.add_argument("--ignored", type=float, default=0.02, help="share of the tokens")
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=60, help="back-to-back time of a provider in a round")
    parser.add_argument(
        "--ahead-ms", type=float, default=40, help="that the host is ahead of the GPU; 0: its time counts"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="to note in the CSV, where git cannot tell")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    shapes = [parse_shape(text) for text in options.shapes.split(",")] if options.shapes else SHAPES
    report = Report(options.out / environment(device).slug / "cross_entropy.csv")
    for shape in shapes:
        rows = measure(shape, options.ignored, device, options.providers.split(","), options)
        report.add(rows)
        say(f"{shape[0]}x{shape[1]} {shape[2]}\n{table(rows)}")


if __name__ == "__main__":
    main()
