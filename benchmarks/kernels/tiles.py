"""Times tile shapes of the three GEMMs against cuBLAS. The figures in flce_ops/triton/gemm/tiles.py come from here.

    python -m benchmarks.kernels.tiles [--rounds 3] [--ms 100]

Every candidate runs back to back for --ms in each round, in random order. The median of the CUDA-event times is
printed.
"""

import argparse
import random
import statistics
import time
from dataclasses import replace

import torch
import triton

from flce_ops.math.options import LogitOptions
from flce_ops.triton.gemm.epilogues import ExpSum, Gradient
from flce_ops.triton.gemm.input_gradient import Finish, InputGradient
from flce_ops.triton.gemm.logits_gemm import launch_logits_gemm
from flce_ops.triton.gemm.tiles import HOPPER, INPUT_TILES, WEIGHT_TILES, Tiles
from flce_ops.triton.gemm.weight_gradient import WeightGradient
from flce_ops.triton.rows.valid_tokens import ValidTokens

# n rows of a chunk, D hidden, V vocabulary
SHAPES = ((2048, 4096, 128256), (2048, 2304, 256000), (4096, 896, 151936))

CANDIDATES = {
    "128x256x64 s3": replace(HOPPER, store_halves=False),
    "128x256x64 s3 halves": HOPPER,
    "128x256x64 s4 halves": replace(HOPPER, num_stages=4),
    "128x256x64 s3 halves g8": replace(HOPPER, group=8),
    "256x128x64 s3": replace(HOPPER, block_m=256, block_n=128, store_halves=False),
}

INPUT_CANDIDATES = {
    "128x256x64 s4": INPUT_TILES["hopper"],
    "128x256x64 s3": replace(INPUT_TILES["hopper"], num_stages=3),
    "256x128x64 s4": INPUT_TILES["hopper, columns of 128"],
    "128x128x32 pointers": INPUT_TILES["hopper, by pointers"],
}
WEIGHT_CANDIDATES = {
    "128x256x64 s3": WEIGHT_TILES["hopper"],
    "128x256x64 s3 g16": replace(WEIGHT_TILES["hopper"], group=16),
    "128x128x32 pointers": WEIGHT_TILES["hopper, by pointers"],
}
PARTS = 4  # slices of V for which the memory of the input gradient's products suffices


def measure(step, ms: float) -> float:
    """Median milliseconds of back-to-back calls. The first third is dropped, and a few calls are always queued."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    events = []
    while time.perf_counter() - begin < ms / 1e3:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        events.append((start, end))
        if len(events) > 6:
            events[-6][1].synchronize()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[len(events) // 3 :])


def all_valid(n: int) -> ValidTokens:
    order = torch.arange(n, device="cuda", dtype=torch.int32)
    total = torch.full((), n, device="cuda", dtype=torch.int32)
    return ValidTokens(order, total, 0, total)


def candidate_step(tiles: Tiles, epilogue: str, store: bool, x, w, out):
    n, num_classes = x.shape[0], w.shape[0]
    partial = torch.empty(triton.cdiv(num_classes, tiles.block_n), n, device="cuda")
    reference = torch.randn(n, device="cuda") + 10
    factor = torch.rand(n, device="cuda")
    operands = {"exp_sum": ExpSum(reference, None, partial), "gradient": Gradient(reference, factor)}
    valid_tokens = all_valid(n)

    def step():
        launch_logits_gemm(
            x,
            w,
            None,
            operands[epilogue],
            LogitOptions(),
            valid_tokens,
            out=out if store else None,
            tiles=tiles,
        )

    return step


def input_step(tiles: Tiles, e, w):
    n, hidden = e.shape[0], w.shape[1]
    finish = Finish(None, torch.zeros(n, device="cuda", dtype=torch.int64), torch.zeros(n, device="cuda"))
    columns = slice(0, w.shape[0])
    product = torch.empty(PARTS * n * hidden, device="cuda")
    gradient = InputGradient(e.new_empty(n, hidden), w, finish, all_valid(n), [columns], product)
    gradient.tiles, gradient.depth = tiles, triton.cdiv(w.shape[0], tiles.block_k)

    def step():
        gradient.add(columns, e)
        gradient.close()

    return step


def weight_step(tiles: Tiles, e, x, grad, first: bool):
    n = e.shape[0]
    gradient = WeightGradient(grad, 3 * n, chunks=3)
    valid_tokens = all_valid(2 * n).of(slice(0, n) if first else slice(n, 2 * n))
    gradient.tiles = tiles
    gradient.sum.exponents.fill_(140)  # 2^13, so that the sums of all rounds stay finite
    gradient.sum.guard.zero_()
    return lambda: gradient.add(slice(0, grad.shape[0]), e, x, valid_tokens)


def steps_of_logits(x, w, out) -> dict:
    steps = {("cublas", "-"): lambda: torch.mm(x, w.T, out=out)}
    for name, tiles in CANDIDATES.items():
        for epilogue, store in (("exp_sum", True), ("exp_sum", False), ("gradient", True)):
            steps[name, epilogue + (" store" if store else "")] = candidate_step(tiles, epilogue, store, x, w, out)
    return steps


def steps_of_gradients(x, w, e) -> dict:
    grad = torch.zeros_like(w)
    steps = {("cublas", "input"): lambda: torch.mm(e, w)}
    steps["cublas", "weight first"] = lambda: torch.mm(e.T, x, out=grad)
    steps["cublas", "weight later"] = lambda: grad.addmm_(e.T, x)
    for name, tiles in INPUT_CANDIDATES.items():
        steps[name, "input"] = input_step(tiles, e, w)
    for name, tiles in WEIGHT_CANDIDATES.items():
        for first in (True, False):
            steps[name, f"weight {'first' if first else 'later'}"] = weight_step(tiles, e, x, grad, first)
    return steps


def report(title: str, steps: dict, flops: float, rounds: int, ms: float) -> None:
    times = {}
    for key, step in steps.items():
        try:
            step()
            torch.cuda.synchronize()
            times[key] = []
        except Exception as error:
            print(f"{' '.join(key)}: {type(error).__name__} {str(error)[:80]}", flush=True)
    for _ in range(rounds):
        for key in random.sample(list(times), len(times)):
            times[key].append(measure(steps[key], ms))
    print(f"--- {title}, TFLOP/s")
    for (name, what), found in times.items():
        print(f"{name:28s} {what:14s} {flops / statistics.median(found):6.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=80)
    options = parser.parse_args()
    for n, hidden, num_classes in SHAPES:
        x = torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16)
        w = (torch.randn(num_classes, hidden, device="cuda") * 2 / hidden**0.5).bfloat16()
        e = torch.rand(n, num_classes, device="cuda", dtype=torch.bfloat16)
        flops = 2 * n * hidden * num_classes / 1e9
        for kind, steps_of in (("logits", steps_of_logits), ("gradients", steps_of_gradients)):
            title = f"{kind}, n={n} D={hidden} V={num_classes}"
            report(title, steps_of(x, w, e), flops, options.rounds, options.ms)


if __name__ == "__main__":
    main()
