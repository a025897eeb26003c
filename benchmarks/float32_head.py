"""python -m benchmarks.float32_head: how far log-probabilities are from those of a float32 head.

    ours       linear_log_probs of the operands as they are
    float32    an engine's head in float32 (vLLM's head_dtype): float32 copies of the operands, without TF32
    mixed      a GEMM of the operands with a float32 result (torch.mm(..., out_dtype=torch.float32)); CUDA, 16 bits
    rounded    logits in the operands' dtype, then a float32 log_softmax

`error` and `mean_error` are the largest and the mean distance from float64 of the same operands, in nats, `apart` the
largest distance from `ours`, and `outside` the share of ratios of probabilities to ours outside of 0.9 to 1.1. Rows go
to results/GPU/float32_head.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flce_ops

from .command import command, report_of
from .data import make_problem
from .report import Environment, environment, reason_of, say, table_of
from .shapes import Shape, parse_shapes

# N tokens, D hidden, V vocabulary

SHAPES = "4096x4096x128256,4096x2304x256000,8192x2048x128256,8192x896x151936,4096x1536x50257,8192x512x32000"
DTYPES = "bfloat16,float16,float32"
LOGITS = 2**28  # float64 logits that are held at a time: 2 GiB
HALF = (torch.bfloat16, torch.float16)


@dataclass
class HeadRow(Environment):
    N: int
    D: int
    V: int
    dtype: str
    head: str
    number: str
    error: float | None = None
    mean_error: float | None = None
    apart: float | None = None
    outside: float | None = None
    reason: str = ""


def heads(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Functions that make logits of (n, D) tokens and the (V, D) weight."""
    found = {"float32": lambda x, w: x.float() @ w.float().T}
    if dtype in HALF:
        if device.type == "cuda":
            found["mixed"] = lambda x, w: torch.mm(x, w.T, out_dtype=torch.float32)
        found["rounded"] = lambda x, w: (x @ w.T).float()
    return found


@torch.no_grad()
def measure(shape: Shape, dtype: torch.dtype, device: torch.device, options: argparse.Namespace) -> list[HeadRow]:
    problem = make_problem(shape, dtype=dtype, device=device, seed=options.seed, ignored=0.0)
    x, w, target = problem.input, problem.linear_weight, problem.target
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, str(dtype).removeprefix("torch."))

    def log_probs(logits_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parts = zip(x.split(max(1, LOGITS // shape.V)), target.split(max(1, LOGITS // shape.V)))
        return torch.cat([logits_of(some, w).log_softmax(-1).gather(-1, y[:, None])[:, 0] for some, y in parts])

    ours, exact = flce_ops.linear_log_probs(x, w, target).log_probs, log_probs(lambda x, w: x.double() @ w.double().T)
    rows = []
    for name, logits_of in {"ours": None, **heads(dtype, device)}.items():
        row = HeadRow(*machine, name, "log_probs")
        rows.append(row)
        try:
            found = ours if logits_of is None else log_probs(logits_of)
        except (RuntimeError, TypeError) as error:
            row.reason = reason_of(error)
            continue
        off, apart = (found.double() - exact).abs(), (found - ours).double()
        row.error, row.mean_error = off.max().item(), off.mean().item()
        if logits_of:
            row.apart = apart.abs().max().item()
            row.outside = ((apart.exp() < 0.9) | (apart.exp() > 1.1)).double().mean().item()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("float32_head", __doc__, shapes=SHAPES, dtypes=DTYPES, seed=1)
    options = parser.parse_args(argv)
    device, report = torch.device(options.device), report_of("float32_head", options)
    torch.backends.cuda.matmul.allow_tf32 = False
    for shape in parse_shapes(options.shapes):
        for dtype in options.dtypes.split(","):
            rows = measure(shape, getattr(torch, dtype), device, options)
            report.add(rows)
            columns = [("error", 10, ".1e"), ("mean_error", 12, ".1e"), ("apart", 9, ".1e"), ("outside", 9, ".2%")]
            say(table_of(rows, columns, heading=f"{shape} {dtype}", width=32, name_of=lambda row: row.head))


if __name__ == "__main__":
    main()
