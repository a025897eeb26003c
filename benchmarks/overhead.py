"""python -m benchmarks.overhead: what a training step costs beside its mathematics.

On a CPU, 8 x 8 x 16: microseconds and Python calls of forward and backward, eager and compiled. On CUDA also the host's
milliseconds from the call of forward to backward's return, eager and compiled, at the shapes of the group "small" and
at two whose GEMMs take less than that. To compare two commits run both in turn, several times: the clock moves more
than they differ.
"""

import functools
import statistics
import sys
import time

import torch

import flce_ops
from benchmarks.shapes import GROUPS, Shape

SHAPES = (Shape(128, 512, 32000), Shape(256, 2048, 32000), *GROUPS["small"])
STEPS = 300
ROUNDS = 9


def operands(tokens: int, hidden: int, classes: int, dtype: torch.dtype, device: str):
    input = torch.randn(tokens, hidden, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(classes, hidden, dtype=dtype, device=device, requires_grad=True)
    return input, weight, torch.randint(classes, (tokens,), device=device)


def step(loss_function, input, weight, target) -> None:
    loss_function(input, weight, target).backward()
    input.grad = weight.grad = None


def microseconds(run, device: str) -> float:
    """Median of rounds of the mean of their steps; the host's part on CUDA."""
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(STEPS):
            run()
        rounds.append((time.perf_counter() - began) / STEPS * 1e6)
        if device == "cuda":
            torch.cuda.synchronize()
    return statistics.median(rounds)


def python_calls(run) -> int:
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    with torch.autograd.set_multithreading_enabled(False):  # backward's calls are counted too
        sys.setprofile(count)
        run()
        sys.setprofile(None)
    return calls


def launch_ms(loss_function, arguments) -> float:
    """Median time from the call of a step to its return."""
    for _ in range(5):
        step(loss_function, *arguments)
    torch.cuda.synchronize()
    times = []
    for _ in range(50):  # one step at a time: a full queue would make the host wait
        began = time.perf_counter()
        step(loss_function, *arguments)
        times.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    for name, loss_function in (
        ("eager", flce_ops.linear_cross_entropy),
        ("compiled", torch.compile(flce_ops.linear_cross_entropy, fullgraph=True)),
    ):
        arguments = operands(8, 8, 16, torch.float32, "cpu")
        for _ in range(20):
            step(loss_function, *arguments)
        run = functools.partial(step, loss_function, *arguments)
        print(f"cpu 8x8x16 {name}: {microseconds(run, 'cpu'):.0f} us, {python_calls(run)} calls")
    if not torch.cuda.is_available():
        return
    for shape in SHAPES:
        arguments = operands(*shape, torch.bfloat16, "cuda")
        torch._dynamo.reset()  # past its limit of shapes it would run eagerly
        compiled = torch.compile(flce_ops.linear_cross_entropy, fullgraph=True, dynamic=False)
        eager_ms, compiled_ms = (launch_ms(f, arguments) for f in (flce_ops.linear_cross_entropy, compiled))
        print(f"cuda {shape} bfloat16, host: {eager_ms:.3f} ms eager, {compiled_ms:.3f} ms compiled", flush=True)


if __name__ == "__main__":
    main()
