"""`python -m flce_ops.check`: checks on this machine, in about a minute, what the documents promise of the operator.

Every case runs in flce_ops, in plain PyTorch of the same dtype, and in float64, which serves as the exact result. On a
GPU, one training step is timed beside eager PyTorch and torch.compile, and its temporary memory is measured. The output
can be pasted into an issue. The exit code is 1 if a line is worse than promised.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
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
    ours: str
    plain: str
    promised: bool
    path: str = ""

    def __str__(self) -> str:
        return f"| {self.what} | {self.ours} | {self.plain} | {'yes' if self.promised else '**NO**'} | {self.path} |"


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
    print(f"flce_ops {__version__} on {device}\n{get_pretty_env_info()}\n")
    print("| | flce_ops | PyTorch | as promised | path |\n|---|---|---|---|---|")
    lines = []
    torch.manual_seed(0)
    found = make_head(SHAPES["cuda" if device.type == "cuda" else "cpu"], device)
    for dtype in DTYPES:
        for name, functions in CASES.items():
            lines += shown(errors(name, found.to(dtype), *functions))
    if device.type == "cuda":
        lines += shown(step(make_head(TIMED, device).to(torch.bfloat16)))
    worse = sum(not line.promised for line in lines)
    print(f"\n{worse} of {len(lines)} lines are worse than promised" if worse else "\nall as promised")
    return 1 if worse else 0


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
    found, path = derived(ours, head), last_path()
    dense = derived(plain, head)
    exact = derived(plain, head.to(torch.float64))
    dtype = head.input.dtype
    lines = []
    for what, numbers, unit in ("value", slice(0, 1), torch.float32), ("gradients", slice(1, 3), dtype):
        mine, theirs = (largest_error(some[numbers], exact[numbers]) for some in (found, dense))
        promised = mine <= TIMES_PLAIN * theirs + UNITS * torch.finfo(unit).eps
        row = f"{name}, {what}, error in {str(dtype).removeprefix('torch.')}"
        lines.append(Line(row, f"{mine:.1e}", f"{theirs:.1e}", promised, path.implementation if path else ""))
    return lines


def derived(function: Function, head: Head) -> list[Tensor]:
    value = function(head)
    return [value.detach(), *torch.autograd.grad(value, head[:2])]


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact))


def step(head: Head) -> list[Line]:
    """Forward and backward of a loss: milliseconds, and MiB beyond the gradients."""
    ours, plain = CASES["loss"]
    compiled = torch.compile(lambda input, linear_weight: plain(Head(input, linear_weight, head.target)))
    size = " x ".join(map(str, (*head.input.shape, head.linear_weight.shape[0])))
    measured = {}
    for name, function in {"flce_ops": ours, "eager": plain, "torch.compile": lambda head: compiled(*head[:2])}.items():
        try:
            measured[name] = time_and_memory(function, head)
        except Exception as error:  # torch.compile is not installed, or the logits do not fit the memory
            if name == "flce_ops":
                raise
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    milliseconds, memory = measured.pop("flce_ops")
    path = last_path()
    lines = []
    for name, (theirs, more) in measured.items():
        slower = name == "eager" and milliseconds > theirs  # torch.compile's time is shown, but not judged
        lines.append(Line(f"step of {size} beside {name}", f"{milliseconds:.2f} ms", f"{theirs:.2f} ms", not slower))
        lines.append(Line("its temporary memory", f"{memory / MIB:.0f} MiB", f"{more / MIB:.0f} MiB", memory < more))
    room = get_workspace()
    within = memory <= 1.02 * room
    lines.append(Line("workspace", f"{memory / MIB:.0f} MiB", f"{room / MIB:.0f} MiB allowed", within))
    return [line._replace(path=path.implementation if path else "") for line in lines]


def time_and_memory(function: Function, head: Head) -> tuple[float, int]:
    def run() -> None:
        torch.autograd.grad(function(head), head[:2])

    for _ in range(3):  # the first run compiles
        run()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = Timer("run()", globals={"run": run}).timeit(STEPS).median  # of a step; it waits for the GPU
    results = sum(leaf.numel() * leaf.element_size() for leaf in head[:2])
    return 1e3 * seconds, torch.cuda.max_memory_allocated() - before - results


if __name__ == "__main__":
    sys.exit(main())
