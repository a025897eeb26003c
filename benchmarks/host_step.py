"""The host time of one step in this process, without its mathematics. overhead.py compares such processes.

`python -m benchmarks.host_step CHECKOUT [--cuda]` imports flce_ops from CHECKOUT and prints one JSON line a figure.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from benchmarks.shapes import Shape

TINY = Shape(8, 8, 16)
# mostly launches; a small head; few tokens at large heads
CUDA_SHAPES = (Shape(128, 512, 32000), Shape(2048, 512, 32000), Shape(256, 4096, 128256), Shape(1024, 2048, 128256))
MODES = ("eager", "compiled", "no_grad")
STEPS = 20
ROUNDS = 150  # short rounds, some of which no other process disturbs


class Figure(NamedTuple):
    device: str
    shape: tuple[int, int, int]
    dtype: str
    mode: str
    us: list[float]  # microseconds of each round
    calls: int | None = None  # calls of Python functions


def operands(tokens: int, hidden: int, classes: int, dtype: torch.dtype, device: str):
    input = torch.randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(classes, hidden, dtype=dtype, device=device, requires_grad=True)
    return input, weight, torch.randint(classes, (tokens,), device=device)


def training_step(loss_function, input, weight, target) -> None:
    loss_function(input, weight, target).backward()
    input.grad = weight.grad = None


def step_without_gradients(loss_function, *arguments) -> None:
    with torch.no_grad():
        loss_function(*arguments)


def steps(arguments) -> Iterator[tuple[str, Callable[[], None]]]:
    import flce_ops

    eager = flce_ops.linear_cross_entropy
    for mode in MODES:
        function, step = eager, step_without_gradients if mode == "no_grad" else training_step
        if mode == "compiled":
            torch._dynamo.reset()  # after its limit of shapes, torch.compile would run eagerly
            function = torch.compile(eager, fullgraph=True, dynamic=False)
        run = functools.partial(step, function, *arguments)
        for _ in range(20):
            run()
        yield mode, run


def python_calls(run: Callable[[], None]) -> int:
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    with torch.autograd.set_multithreading_enabled(False):  # so that backward's calls are counted, too
        sys.setprofile(count)
        run()
        sys.setprofile(None)
    return calls


def cpu_figures() -> Iterator[Figure]:
    torch.set_num_threads(1)
    for mode, run in steps(operands(*TINY, torch.float32, "cpu")):
        rounds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(STEPS):
                run()
            rounds.append((time.perf_counter() - began) / STEPS * 1e6)
        yield Figure("cpu", TINY, "float32", mode, rounds, python_calls(run))


def cuda_figures() -> Iterator[Figure]:
    """From the call of a step to its return. Steps run one at a time: with a full queue the host would wait."""
    for shape in CUDA_SHAPES:
        for mode, run in steps(operands(*shape, torch.bfloat16, "cuda")):
            torch.cuda.synchronize()
            rounds = []
            for _ in range(50):
                began = time.perf_counter()
                run()
                rounds.append((time.perf_counter() - began) * 1e6)
                torch.cuda.synchronize()
            yield Figure("cuda", shape, "bfloat16", mode, rounds, python_calls(run))


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.host_step", description=__doc__)
    parser.add_argument("checkout", help="where flce_ops is imported from")
    parser.add_argument("--cuda", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, options.checkout)
    for figure in cuda_figures() if options.cuda else cpu_figures():
        print(json.dumps(figure._asdict()), flush=True)


if __name__ == "__main__":
    main()
