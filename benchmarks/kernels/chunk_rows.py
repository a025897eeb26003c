"""Times the three GEMMs of a chunk against its rows: what chunks of few rows cost.

    python -m benchmarks.kernels.chunk_rows [--ms 60]

Microseconds per row of the exponentials' GEMM, of grad_input = E @ W and of grad_linear_weight += E.T @ x.
"""

import argparse

import torch

from benchmarks.kernels.tiles import candidate_step, input_step, measure, weight_step
from flce_ops.triton.target import input_tiles_for, tiles_for, weight_tiles_for

# D hidden, V vocabulary
SHAPES = ((4096, 128256), (2304, 256000), (2048, 128256), (896, 151936), (5120, 151936), (8192, 128256))
ROWS = (512, 640, 768, 896, 1024, 1280, 1408, 1536, 1792, 2048, 2560, 3072, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ms", type=float, default=60)
    options = parser.parse_args()
    for hidden, num_classes in SHAPES:
        w = (torch.randn(num_classes, hidden, device="cuda") * 2 / hidden**0.5).bfloat16()
        grad = torch.zeros_like(w)
        print(f"--- D={hidden} V={num_classes}: us per row, at 700 TFLOP/s {2e6 * hidden * num_classes / 700e12:.3f}")
        for rows in ROWS:
            x = torch.randn(rows, hidden, device="cuda").bfloat16()
            e = torch.empty(rows, num_classes, device="cuda", dtype=torch.bfloat16)
            logits = candidate_step(tiles_for(x), "exp_sum", True, x, w, e)
            logits()
            steps = {
                "E": logits,
                "dX": input_step(input_tiles_for(w), e, w),
                "dW": weight_step(weight_tiles_for(grad), e, x, grad, first=False),
            }
            times = {name: measure(step, options.ms) * 1e3 / rows for name, step in steps.items()}
            cells = "  ".join(f"{name} {time:6.3f}" for name, time in times.items())
            print(f"{rows:5d}  {cells}  sum {sum(times.values()):6.3f}", flush=True)
        del w, grad, x, e, steps, logits


if __name__ == "__main__":
    main()
