"""Many steps of one process, the number of tokens another in each: neither memory nor caches grow.

    python -m tests.long_run [--steps 10000] [--device cuda]

The calls take turns: a loss, losses per token, log-probabilities, a policy's loss, a divergence, given logits, a
compiled loss. After a third of the steps everything that is kept should be there: what the process holds then is
compared with what it holds at the end. Exits with an error where that has grown.
"""

import argparse
import gc
import random
import sys
from typing import NamedTuple

import torch
from torch import Tensor

import flce_ops

D, V, LARGEST = 64, 2003, 700  # hidden, vocabulary, tokens
MiB = 1 << 20
# What the process may hold more at the end: the C allocator's arenas move by some MiB, a step's own memory is 5.
SLACK = {"resident": 24 * MiB, "allocated": 0, "entries of caches": 0, "tensors": 0}
SLACK_ON_CUDA = SLACK | {"entries of caches": 30}  # of 31,000 of torch and Triton: 6 more at the end were seen


class Step(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor


def loss(step: Step) -> Tensor:
    return flce_ops.linear_cross_entropy(*step)


def losses(step: Step) -> Tensor:
    return flce_ops.linear_cross_entropy(*step, reduction="none").sum()


def log_probs(step: Step) -> Tensor:
    return flce_ops.linear_log_probs(*step, entropy=True).entropy.sum()


def policy(step: Step) -> Tensor:
    per_token = torch.ones(step.target.shape, device=step.target.device)
    return flce_ops.linear_policy_loss(*step, per_token, -per_token)[0]


def divergence(step: Step) -> Tensor:
    return flce_ops.linear_kl_div(step.hidden, step.weight, step.hidden.detach().flip(0), step.weight.detach())


def given_logits(step: Step) -> Tensor:
    return flce_ops.cross_entropy(step.hidden @ step.weight.T, step.target)


CALLS = [loss, losses, log_probs, policy, divergence, given_logits]


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def entries_of_caches() -> int:
    """Of the package's own modules: dicts, sets and lists that are module-level, and what functools.cache keeps."""
    count = 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "flce_ops":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_info"):
                    count += value.cache_info().currsize
                elif type(value) in (dict, set, list):
                    count += len(value)
    return count


def held(device: str) -> dict[str, int]:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        "resident": resident(),
        "allocated": torch.cuda.memory_allocated() if device == "cuda" else 0,
        "entries of caches": entries_of_caches(),
        "tensors": sum(isinstance(value, Tensor) for value in gc.get_objects()),
    }


def run(steps: int, device: str, *, compiled: bool = True) -> dict[str, tuple[int, int]]:
    """After a third of the steps, and after all."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    calls = list(CALLS)
    if compiled:
        graph = torch.compile(flce_ops.linear_cross_entropy, dynamic=True)
        calls.append(lambda step: graph(*step))
    weight = torch.randn(V, D, device=device, dtype=dtype, requires_grad=True)
    choose, before = random.Random(0), {}
    for number in range(steps):
        tokens = choose.randint(1, LARGEST)
        hidden = torch.randn(tokens, D, device=device, dtype=dtype, requires_grad=True)
        step = Step(hidden, weight, torch.randint(V, (tokens,), device=device))
        gradients = torch.autograd.grad(calls[number % len(calls)](step), (hidden, weight))
        del hidden, step, gradients
        if number == steps // 3:
            before = held(device)
    after = held(device)
    return {name: (before[name], after[name]) for name in before}


def grown(found: dict[str, tuple[int, int]], device: str) -> list[str]:
    slack = SLACK_ON_CUDA if device == "cuda" else SLACK
    return [
        f"{name}: {before} after a third of the steps, {after} after all"
        for name, (before, after) in found.items()
        if after - before > slack[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--eager", action="store_true", help="without the compiled loss")
    given = parser.parse_args()
    found = run(given.steps, given.device, compiled=not given.eager)
    for name, (before, after) in found.items():
        print(f"{name}: {before:,} after {given.steps // 3} steps, {after:,} after {given.steps}")
    told = grown(found, given.device)
    for line in told:
        print(f"grown: {line}")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
