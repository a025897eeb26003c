"""`python -m benchmarks.numerics_table`: errors of loss, dX and dW against float64, per dtype, of this package and
plain torch.

    python -m benchmarks.numerics_table                      # -> benchmarks/results/<device>/numerics.csv
    python -m benchmarks.numerics_table --device cuda        # float16 and bfloat16 by the Triton kernels

Every implementation gets the same rounded inputs (benchmarks/data.py: Zipf prior, targets from the softmax, 2 %
ignored). The reference is a float64 computation on them. The error is ||out - reference|| / ||reference||. float16
gradients are those of the loss times 4096 (data.py), as with torch.amp.GradScaler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flce_ops

from .command import command, report_of
from .data import Problem, make_problem
from .errors import errors_of, make_reference
from .modes import MODES, prepare
from .report import environment, say
from .shapes import Shape, parse_shapes

SHAPES = {"cpu": Shape(256, 288, 32003), "cuda": Shape(8192, 2048, 128256)}  # each under a minute
SMALL_WORKSPACE = 32 << 20  # too small for a float32 sum of dW, which is then rounded once a chunk


@dataclass
class NumericsRow:
    device: str
    torch: str
    triton: str
    commit: str
    N: int
    D: int
    V: int
    dtype: str
    provider: str
    err_loss: float
    err_dx: float
    err_dw: float
    seed: int


def small_workspace(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return flce_ops.linear_cross_entropy(x, weight, target)


PROVIDERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "F.cross_entropy": lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
    "F.cross_entropy, float32 logits": lambda x, weight, target: F.cross_entropy(F.linear(x, weight).float(), target),
    "flce_ops": flce_ops.linear_cross_entropy,
    "flce_ops, workspace 32 MiB": small_workspace,
}


def measure(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, commit: str | None) -> list[NumericsRow]:
    problem = make_problem(shape, dtype=dtype, device=device, seed=seed)
    mode = MODES["fwd_bwd"]
    truth = make_reference(problem, mode)
    prepare(problem, mode)
    here = environment(device, commit)
    rows = []
    for name, function in PROVIDERS.items():
        with flce_ops.workspace(SMALL_WORKSPACE) if function is small_workspace else contextlib.nullcontext():
            loss = step(function, problem)
        errors = errors_of(loss, problem, truth)
        place = (here.gpu, here.torch, here.triton, here.commit, *shape, str(dtype).removeprefix("torch."))
        rows.append(NumericsRow(*place, name, *errors, seed))
    return rows


def step(function: Callable, problem: Problem) -> Tensor:
    """Returns the loss, and leaves gradients in .grad."""
    problem.clear_gradients()
    loss = function(problem.input, problem.linear_weight, problem.target)
    loss.backward(problem.grad_output)
    return loss.detach()


def main(argv: Sequence[str] | None = None) -> Path:
    parser = command("numerics_table", __doc__)
    defaults = ", ".join(f"{shape} on {kind}" for kind, shape in SHAPES.items())
    parser.add_argument("--shape", default=None, help=f"NxDxV, default {defaults}")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, noted in the rows")
    options = parser.parse_args(argv)
    device, report = torch.device(options.device), report_of("numerics", options)
    (shape,) = parse_shapes(options.shape) if options.shape else (SHAPES[device.type],)
    seed = int(torch.seed() % 2**31) if options.seed is None else options.seed
    say(f"{'dtype':10}{'':34}{'loss':>10}{'dX':>10}{'dW':>10}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = measure(shape, dtype, device, seed, options.commit)
        report.add(rows)
        for row in rows:
            say(f"{row.dtype:10}{row.provider:34}{row.err_loss:10.1e}{row.err_dx:10.1e}{row.err_dw:10.1e}")
    say(f"-> {report.path}")
    return report.path


if __name__ == "__main__":
    main()
