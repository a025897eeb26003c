"""python -m benchmarks.cross_entropy: forward and backward of the loss of given logits, and the bandwidth they reach.

GB/s counts the bytes that any implementation must move: one read of the rows that are not ignored, and one write of a
gradient of all rows. `share` is GB/s relative to that of `copy`, a clone of the logits, which does nothing else. ms is
the GPU's time, with the host ahead as in a training step (--ahead-ms). host us is the time to launch a step.

Providers that overwrite the logits get a copy of their own. From their first timed step on, they read their own
gradients instead of logits. The errors are measured on random logits.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops

from . import providers
from .command import command, report_of
from .memory import MIB, peak_bytes_cuda
from .report import Environment, environment, reason_of, say, table_of
from .timing import launch_to_return, time_steps

# N tokens, V vocabulary

# NxV:dtype; the CSV is complete after each shape. Llama 3 (a row does not fit the registers of a multiprocessor), two
# smaller heads, Qwen, GPT-2 (rows start at any alignment)
SHAPES = (
    "8192x128256:bfloat16,8192x32000:bfloat16,16384x50304:bfloat16,16384x32000:float32,4096x151936:bfloat16,"
    "2048x32000:bfloat16,8192x128256:float32,4096x50257:bfloat16"
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


IN_PLACE = {"inplace_backward": True}
# name: (distribution, function that makes the loss)
PROVIDERS: dict[str, tuple[str, Callable[[], Loss]]] = {
    "ours": ("flce_ops", lambda: flce_ops.cross_entropy),
    "ours_in_place": ("flce_ops", lambda: partial(flce_ops.cross_entropy, **IN_PLACE)),
    "torch_eager": ("torch", lambda: F.cross_entropy),
    "torch_compile": ("torch", lambda: torch.compile(F.cross_entropy, dynamic=False)),
    "liger": ("liger_kernel", liger),
    "quack": ("quack_kernels", partial(quack, False)),
    "quack_in_place": ("quack_kernels", partial(quack, True)),
}


def make_problem(tokens: int, classes: int, dtype: str, ignored: float, device: torch.device) -> tuple[Tensor, Tensor]:
    logits = torch.empty(tokens, classes, dtype=getattr(torch, dtype), device=device)
    for rows in logits.split(1024):
        rows.copy_(2.0 * torch.randn(rows.shape, device=device))
    target = torch.randint(classes, (tokens,), device=device)
    target[torch.rand(tokens, device=device) < ignored] = -100
    return logits.requires_grad_(), target


def gradient(loss: Loss, logits: Tensor, target: Tensor) -> Tensor:
    return torch.autograd.grad(loss(Made.apply(logits), target), logits)[0]


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
        distribution, make = PROVIDERS[name]
        rows[name] = row = LogitsRow(*machine, name, providers.version_of(distribution))
        try:
            loss = make()
            row.err_loss, row.err_grad = errors(loss, logits, target, truth)
            steps[name] = step = partial(gradient, loss, logits, target)
            row.peak_MiB = peak_bytes_cuda(step) / MIB if device.type == "cuda" else None
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
        row.host_us = launch_to_return(steps[name]) if device.type == "cuda" else None
        row.GBps = (2 * logits.nbytes if name == "copy" else moved) / timing.ms / 1e6
    for name in timings:
        rows[name].share = rows[name].GBps / rows["copy"].GBps
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> Path:
    defaults = {"shapes": SHAPES, "ignored": 0.02, "providers": ",".join(PROVIDERS), "rounds": 3, "ms": 60.0}
    parser = command("cross_entropy", __doc__, **defaults)
    ahead = "that the host is ahead of the GPU; 0: its time counts"
    parser.add_argument("--ahead-ms", type=float, default=40, help=ahead)
    options = parser.parse_args(argv)
    device, report = torch.device(options.device), report_of("cross_entropy", options)
    for text in options.shapes.split(","):
        size, _, dtype = text.partition(":")
        tokens, classes = map(int, size.split("x"))
        shape = (tokens, classes, dtype or "bfloat16")
        rows = measure(shape, options.ignored, device, options.providers.split(","), options)
        report.add(rows)
        columns = [("ms", 9, ".3f"), ("spread", 8, ".1%"), ("host_us", 9, ".0f"), ("GBps", 7, ".0f")]
        columns += [("share", 8, ".1%"), ("peak_MiB", 9, ".0f"), ("err_loss", 10, ".1e"), ("err_grad", 10, ".1e")]
        say(table_of(rows, columns, heading=text, width=24, name_of=lambda row: row.provider))
    return report.path


if __name__ == "__main__":
    main()
