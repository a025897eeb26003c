"""Times tile shapes of the logits GEMM against cuBLAS: where the lines of flce_ops/triton/tiles.py come from.

    python -m benchmarks.kernels.tiles [--rounds 3] [--ms 100]

Every candidate runs back to back for --ms per round in random order; the median of the CUDA-event times is printed.
"""

import argparse
import random
import statistics
import time
from dataclasses import replace

import torch
import triton

from flce_ops.math.options import LogitOptions
from flce_ops.triton.epilogues import ExpSum, Gradient
from flce_ops.triton.logits_gemm import launch_logits_gemm
from flce_ops.triton.tiles import HOPPER, Tiles

# n rows of a chunk, D hidden, V vocabulary
SHAPES = ((2048, 4096, 128256), (2048, 2304, 256000), (4096, 896, 151936))

CANDIDATES = {
    "128x256x64 s3": replace(HOPPER, flatten=False, store_halves=False),
    "128x256x64 s3 flat": replace(HOPPER, store_halves=False),
    "128x256x64 s3 flat halves": HOPPER,
    "128x256x64 s4 flat halves": replace(HOPPER, num_stages=4),
    "128x256x64 s3 flat halves g8": replace(HOPPER, group=8),
    "128x256x64 s3 ws halves": replace(HOPPER, flatten=False, warp_specialize=True),
    "256x128x64 s3 flat": replace(HOPPER, block_n=256, block_v=128, store_halves=False),
    "128x128x64 w4 s3 x2 flat": replace(HOPPER, block_v=128, num_warps=4, programs_per_sm=2),
}


def measure(step, ms: float) -> float:
    """Median milliseconds of back-to-back calls, the first third dropped, a few of them always queued."""
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


def candidate_step(tiles: Tiles, epilogue: str, store: bool, x, w, out):
    n, num_classes = x.shape[0], w.shape[0]
    partial = torch.empty(triton.cdiv(num_classes, tiles.block_v), n, device="cuda")
    reference = torch.randn(n, device="cuda") + 10
    factor = torch.rand(n, device="cuda")
    operands = {"exp_sum": ExpSum(reference, None, partial), "gradient": Gradient(reference, factor)}

    def step():
        launch_logits_gemm(
            x,
            w,
            None,
            operands[epilogue],
            LogitOptions(),
            out=out if store else None,
            tiles=tiles,
        )

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=80)
    options = parser.parse_args()
    for n, hidden, num_classes in SHAPES:
        x = torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16)
        w = (torch.randn(num_classes, hidden, device="cuda") * 2 / hidden**0.5).bfloat16()
        out = torch.empty(n, num_classes, device="cuda", dtype=torch.bfloat16)
        steps = {("cublas", "-"): lambda x=x, w=w, out=out: torch.mm(x, w.T, out=out)}
        for name, tiles in CANDIDATES.items():
            for epilogue, store in (("exp_sum", True), ("exp_sum", False), ("gradient", True)):
                step = candidate_step(tiles, epilogue, store, x, w, out)
                try:
                    step()
                    torch.cuda.synchronize()
                except Exception as error:
                    print(f"{name} {epilogue}: {type(error).__name__} {str(error)[:80]}", flush=True)
                    continue
                steps[name, epilogue + (" store" if store else "")] = step
        times = {key: [] for key in steps}
        for _ in range(options.rounds):
            for key in random.sample(list(steps), len(steps)):
                times[key].append(measure(steps[key], options.ms))
        flops = 2 * n * hidden * num_classes / 1e9
        print(f"--- n={n} D={hidden} V={num_classes}  (TFLOP/s: exp_sum store | exp_sum | gradient)")
        print(f"{'cublas':28s} {flops / statistics.median(times['cublas', '-']):6.0f}")
        for name in CANDIDATES:
            row = [times.get((name, e)) for e in ("exp_sum store", "exp_sum", "gradient store")]
            if any(row):
                print(
                    f"{name:28s} " + " ".join(f"{flops / statistics.median(t):6.0f}" if t else "   -  " for t in row),
                    flush=True,
                )


if __name__ == "__main__":
    main()
