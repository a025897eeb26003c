"""`python -m flce_ops.check`: checks on this machine, in about a minute, what the documents promise of the operator.

Every case runs in flce_ops, in plain PyTorch of the same dtype, and in float64, which serves as the exact result. On a
GPU, one training step runs beside eager PyTorch and torch.compile: its errors, its time and its temporary memory. The
output can be pasted into an issue; what is being done is written to stderr. The exit code is 1 if a line is worse than
promised.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.collect_env import get_pretty_env_info

from .functional import linear_cross_entropy, linear_log_probs
from .support.path import last_path
from .support.workspace import get_workspace
from .version import __version__

# N tokens, D hidden, V vocabulary; no size is a multiple of a tile
SHAPES = {"cpu": (200, 72, 4099), "cuda": (1000, 1032, 32003)}
TIMED = (4096, 2048, 128256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IGNORED = 0.1
STEPS = 10
MIB = 1 << 20
# This package and plain PyTorch sum in different orders, so their rounding errors differ by chance. If the terms of a
# loss cancel, an error of a few units in the last place remains.
TIMES_PLAIN, UNITS = 1.5, 4.0


class Line(NamedTuple):
    what: str
    numbers: list[str]  # of flce_ops, eager PyTorch and torch.compile; empty where there is none
    promised: bool
    path: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join((self.what, *self.numbers, 'yes' if self.promised else '**NO**', self.path))} |"


class Head(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (N,)

    def to(self, dtype: torch.dtype) -> "Head":
        input, linear_weight = (leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in self[:2])
        return Head(input, linear_weight, self.target)


def logits_of(head: Head) -> Tensor:
    """The logits in float32 or float64, as language models compute their losses."""
    product = F.linear(head.input, head.linear_weight)
    return product.to(torch.promote_types(product.dtype, torch.float32))


def plain_loss(head: Head) -> Tensor:
    return F.cross_entropy(logits_of(head), head.target)


def plain_log_probs(head: Head) -> Tensor:
    log_p = F.log_softmax(logits_of(head), -1)
    valid = head.target >= 0
    of_target = log_p.gather(1, head.target.clamp(min=0)[:, None])[:, 0]
    return torch.where(valid, of_target, 0.0).sum() - torch.where(valid, (log_p.exp() * log_p).sum(-1), 0.0).sum()


def log_probs(head: Head) -> Tensor:
    found = linear_log_probs(*head, entropy=True)
    return found.log_probs.sum() + found.entropy.sum()


Function = Callable[[Head], Tensor]
CASES: dict[str, tuple[Function, Function]] = {  # (ours, plain): functions from a head to a scalar
    "loss": (lambda head: linear_cross_entropy(*head), plain_loss),
    "log-probabilities and entropy": (log_probs, plain_log_probs),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m flce_ops.check", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda:1, cpu, ...")
    device = device_of(parser, parser.parse_args(argv).device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # whose time and memory are measured
    progress = Progress()
    progress("reading the versions of this environment")
    print(f"flce_ops {__version__} on {device}\n{get_pretty_env_info()}\n")
    print("| | flce_ops | eager PyTorch | torch.compile | as promised | path |\n|---|---|---|---|---|---|", flush=True)
    lines = []
    torch.manual_seed(0)
    found = make_head(SHAPES["cuda" if device.type == "cuda" else "cpu"], device)
    for dtype in DTYPES:
        for name, functions in CASES.items():
            progress(f"{name} in {name_of(dtype)}; the first call of a dtype compiles kernels on a GPU")
            lines += shown(errors(name, found.to(dtype), *functions))
    if device.type == "cuda":
        lines += shown(step(make_head(TIMED, device).to(torch.bfloat16), progress))
    worse = sum(not line.promised for line in lines)
    verdict = f"{worse} of {len(lines)} lines are worse than promised" if worse else "all as promised"
    print(f"\n{verdict}, in {progress.seconds():.0f} s")
    return 1 if worse else 0


class Progress:
    """Says on stderr what comes next, after how many seconds."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def __call__(self, what: str) -> None:
        print(f"[{self.seconds():5.1f} s] {what}", file=sys.stderr, flush=True)


def device_of(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The device, if torch can use it here."""
    try:
        return torch.empty(0, device=name).device
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    if name.startswith("cuda") and not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no GPU here; install a CUDA build of torch, or pass --device cpu"
    parser.error(f"--device {name}: {reason}")


def shown(lines: list[Line]) -> list[Line]:
    print(*lines, sep="\n", flush=True)
    return lines


def make_head(shape: tuple[int, int, int], device: torch.device) -> Head:
    """A head whose labels are as frequent as a language's words: the r-th with a frequency proportional to 1 / r."""
    tokens, hidden, vocab = shape
    input = torch.randn(tokens, hidden, device=device)
    linear_weight = torch.randn(vocab, hidden, device=device) / hidden**0.5
    target = torch.multinomial(1.0 / torch.arange(1, vocab + 1, device=device), tokens, replacement=True)
    return Head(input, linear_weight, target.masked_fill(torch.rand(tokens, device=device) < IGNORED, -100))


def errors(name: str, head: Head, ours: Function, plain: Function) -> list[Line]:
    """The relative error of the value, and the larger one of the two gradients."""
    found, path = derived(ours, head), path_taken()
    return error_lines(name, found, derived(plain, head), None, derived(plain, head.to(torch.float64)), path)


def error_lines(
    name: str,
    ours: list[Tensor],
    eager: list[Tensor] | None,
    compiled: list[Tensor] | None,
    exact: list[Tensor],
    path: str,
) -> list[Line]:
    lines, dtype = [], ours[1].dtype
    for what, part, unit in ("value", slice(0, 1), torch.float32), ("gradients", slice(1, 3), dtype):
        found = [largest_error(some[part], exact[part]) if some else None for some in (ours, eager, compiled)]
        promised = found[1] is None or found[0] <= TIMES_PLAIN * found[1] + UNITS * torch.finfo(unit).eps
        row = f"{name}, {what}, error in {name_of(dtype)}"
        lines.append(Line(row, [cell(error, ".1e") for error in found], promised, path))
    return lines


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cell(number: float | None, form: str, unit: str = "") -> str:
    return "" if number is None else f"{number:{form}}{unit}"


def path_taken() -> str:
    path = last_path()
    return path.implementation if path else ""


def derived(function: Function, head: Head) -> list[Tensor]:
    value = function(head)
    return [value.detach(), *torch.autograd.grad(value, head[:2])]


@torch.no_grad()
def exact_loss(head: Head, rows: int = 512) -> list[Tensor]:
    """plain_loss and its gradients in float64, with the logits of `rows` tokens at a time."""
    input, linear_weight = head.input.double(), head.linear_weight.double()
    valid = head.target >= 0
    loss, of_input, of_weight = input.new_zeros(()), torch.zeros_like(input), torch.zeros_like(linear_weight)
    for chunk in torch.arange(len(input), device=input.device).split(rows):
        target = head.target[chunk].clamp(min=0)[:, None]
        scale = valid[chunk, None] / valid.sum().double()  # (rows, 1), 0 where ignored
        log_p = F.log_softmax(input[chunk] @ linear_weight.T, -1)
        loss -= (scale * log_p.gather(1, target)).sum()
        of_logits = log_p.exp_().scatter_add_(1, target, -torch.ones_like(scale)).mul_(scale)
        of_input[chunk] = of_logits @ linear_weight
        of_weight.addmm_(of_logits.T, input[chunk])
    return [loss, of_input, of_weight]


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact))


class Measured(NamedTuple):
    results: list[Tensor]  # the loss and its two gradients
    milliseconds: float
    mib: float | None  # beyond the gradients; None on a CPU, where torch does not count them


def step(head: Head, progress: Callable[[str], None]) -> list[Line]:
    """Forward and backward of a loss in flce_ops, eager PyTorch and torch.compile: errors, milliseconds and MiB."""
    ours, plain = CASES["loss"]
    compiled = torch.compile(lambda input, linear_weight: plain(Head(input, linear_weight, head.target)))
    size = " x ".join(map(str, (*head.input.shape, head.linear_weight.shape[0])))
    progress(f"a step of {size}")
    measured: list[Measured | None] = [time_and_memory(ours, head)]
    path = path_taken()
    for name, function in {"eager": plain, "torch.compile": lambda head: compiled(*head[:2])}.items():
        progress(f"the same step, {name}")
        try:
            measured.append(time_and_memory(function, head))
        except Exception as error:  # torch.compile is not installed, or the logits do not fit the memory
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            measured.append(None)
    progress("the same step in float64")
    found, eager, other = (some and some.results for some in measured)
    lines = error_lines(f"step of {size}", found, eager, other, exact_loss(head), path)
    ms = [some and some.milliseconds for some in measured]
    mib = [some and some.mib for some in measured]
    in_time = ms[1] is None or ms[0] <= ms[1]  # torch.compile's time is shown, but not judged
    lines.append(Line("its time", [cell(some, ".2f", " ms") for some in ms], in_time, path))
    if mib[0] is not None:
        room = get_workspace() / MIB
        in_room = mib[0] <= 1.02 * room and all(mib[0] < more for more in mib[1:] if more is not None)
        what = f"its temporary memory, {room:.0f} MiB allowed"
        lines.append(Line(what, [cell(some, ".0f", " MiB") for some in mib], in_room, path))
    return lines


def time_and_memory(function: Function, head: Head) -> Measured:
    results = derived(function, head)  # this run compiles
    for _ in range(2):
        derived(function, head)
    timer = Timer("derived(function, head)", globals={"derived": derived, "function": function, "head": head})
    seconds = timer.timeit(STEPS).median  # of a step; it waits for the GPU
    mib = median(mib_of_a_step(function, head) for _ in range(STEPS)) if head.input.is_cuda else None
    return Measured(results, 1e3 * seconds, mib)


def mib_of_a_step(function: Function, head: Head) -> float:
    """The memory of a step beyond its gradients.

    On a busy CPU autograd's thread may still hold the gradients of the step before. They then count in `before`, and
    the step seems to need less memory. So the caller takes the median of several steps.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = derived(function, head)[1:]
    return (torch.cuda.max_memory_allocated() - before - sum(grad.nbytes for grad in gradients)) / MIB


if __name__ == "__main__":
    sys.exit(main())
