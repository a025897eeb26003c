"""python -m benchmarks.float32_head: how far log-probabilities and entropies are from those of a float32 head.

    ours       linear_log_probs of the operands as they are
    float32    an engine's head in float32 (vLLM's head_dtype): float32 copies of the operands, without TF32
    mixed      a GEMM of the operands with a float32 result (torch.mm(..., out_dtype=torch.float32)); CUDA, 16 bits
    rounded    logits in the operands' dtype, then a float32 log_softmax

`error` and `mean_error` are the largest and the mean distance from float64 of the same operands, in nats, `apart` the
largest distance from `ours`, and `outside` the share of ratios of probabilities to ours outside of 0.9 to 1.1. `lost`
is the part of a logit that its sum of products lost: the mean of 1 - z / z of float64, over logits above half of the
largest. Tensor cores truncate, so there it is not 0. Rows go to results/GPU/float32_head.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flce_ops

from .command import command, report_of
from .data import Problem, make_problem
from .report import Environment, environment, say, table_of
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
    lost: float | None = None
    reason: str = ""


def of_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) in the logits' dtype."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def heads(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Functions that make logits of (n, D) tokens and the (V, D) weight."""
    found = {"float32": lambda x, w: x.float() @ w.float().T}
    if dtype in HALF:
        if device.type == "cuda":
            found["mixed"] = lambda x, w: torch.mm(x, w.T, out_dtype=torch.float32)
        found["rounded"] = lambda x, w: (x @ w.T).float()
    return found


def lost(logits: Tensor, exact: Tensor) -> float:
    large = exact.abs() > 0.5 * exact.abs().amax()
    return (1.0 - logits[large].double() / exact[large]).mean().item()


def parts(problem: Problem) -> Iterator[slice]:
    rows = max(1, LOGITS // problem.shape.V)
    for start in range(0, problem.shape.N, rows):
        yield slice(start, min(start + rows, problem.shape.N))


@torch.no_grad()
def measure(shape: Shape, dtype: torch.dtype, device: torch.device, options: argparse.Namespace) -> list[HeadRow]:
    problem = make_problem(shape, dtype=dtype, device=device, seed=options.seed, ignored=0.0)
    x, w, target = problem.input, problem.linear_weight, problem.target
    ours = flce_ops.linear_log_probs(x, w, target, entropy=True)
    found = {"ours": {"log_probs": ours.log_probs, "entropy": ours.entropy}}
    reasons: dict[str, str] = {}

    def all_of(logits_of: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        results = [of_logits(logits_of(x[part], w), target[part]) for part in parts(problem)]
        return {name: torch.cat(of_all) for name, of_all in zip(("log_probs", "entropy"), zip(*results), strict=True)}

    some = next(parts(problem))
    exact_logits = x[some].double() @ w.double().T
    share: dict[str, float] = {}
    for name, logits_of in heads(dtype, device).items():
        try:
            found[name] = all_of(logits_of)
            share[name] = lost(logits_of(x[some], w), exact_logits)
        except (RuntimeError, TypeError) as error:
            reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    del exact_logits
    exact = all_of(lambda x, w: x.double() @ w.double().T)
    here = environment(device, options.commit)
    machine = (here.gpu, here.torch, here.triton, here.commit, *shape, str(dtype).removeprefix("torch."))
    rows = []
    for name, results in found.items():
        for number, values in results.items():
            off, apart = (values.double() - exact[number]).abs(), (values - found["ours"][number]).double()
            row = HeadRow(*machine, name, number, off.max().item(), off.mean().item(), lost=share.get(name))
            if name != "ours":
                row.apart = apart.abs().max().item()
                if number == "log_probs":
                    row.outside = ((apart.exp() < 0.9) | (apart.exp() > 1.1)).double().mean().item()
            rows.append(row)
    return rows + [HeadRow(*machine, name, "log_probs", reason=reason) for name, reason in reasons.items()]


def table(rows: Sequence[HeadRow]) -> str:
    columns = [
        ("error", 10, ".1e"),
        ("mean_error", 12, ".1e"),
        ("apart", 9, ".1e"),
        ("outside", 9, ".2%"),
        ("lost", 9, ".1e"),
    ]
    return table_of(rows, columns, heading="head", width=22, name_of=lambda row: f"{row.head} {row.number}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("float32_head", __doc__, shapes=SHAPES, dtypes=DTYPES, seed=1)
    options = parser.parse_args(argv)
    device, report = torch.device(options.device), report_of("float32_head", options)
    torch.backends.cuda.matmul.allow_tf32 = False
    for shape in parse_shapes(options.shapes):
        for dtype in options.dtypes.split(","):
            rows = measure(shape, getattr(torch, dtype), device, options)
            report.add(rows)
            say(f"{shape} {dtype}\n{table(rows)}")


if __name__ == "__main__":
    main()
