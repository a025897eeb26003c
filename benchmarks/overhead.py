"""python -m benchmarks.overhead: what a training step costs beside its mathematics.

On a CPU, 8 x 8 x 16: microseconds and Python calls of forward and backward, eager and compiled. On CUDA also the host's
time from the call to its return, at shapes whose GEMMs take less. To compare two commits run both in turn,
several times: the clock moves more than they differ.
"""

import functools
import statistics
import sys
import time

import torch

import flce_ops

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

    torch.autograd.set_multithreading_enabled(False)  # backward's calls are counted too
    sys.setprofile(count)
    run()
    sys.setprofile(None)
    return calls


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
    for shape in ((128, 512, 32000), (256, 2048, 32000)):
        arguments = operands(*shape, torch.bfloat16, "cuda")
        for _ in range(5):
            step(flce_ops.linear_cross_entropy, *arguments)
        torch.cuda.synchronize()
        host = []
        for _ in range(50):  # one step at a time: a full queue would make the host wait
            began = time.perf_counter()
            step(flce_ops.linear_cross_entropy, *arguments)
            host.append((time.perf_counter() - began) * 1e6)
            torch.cuda.synchronize()
        print(f"cuda {'x'.join(map(str, shape))} bfloat16, host: {statistics.median(host):.0f} us")


if __name__ == "__main__":
    main()
