"""`python -m benchmarks.cpu`: forward and backward on a CPU, this package against dense torch in the same dtype.

N tokens, D hidden, V vocabulary. Dense torch is F.cross_entropy(F.linear(input, weight), target), without an upcast.
The method is that of the GPU benchmarks, with the wall clock. Memory is the running sum of the allocations that
torch.profiler records.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import providers
from .data import Problem, make_problem
from .errors import errors_of, make_reference
from .memory import MIB, peak_bytes
from .modes import MODES, Step, prepare, step_of
from .report import KeepingReport, environment, say
from .shapes import Shape, parse_shapes
from .timing import time_steps

MODE = MODES["fwd_bwd"]


@dataclass
class CpuRow:
    cpu: str
    threads: int
    torch: str
    commit: str
    N: int
    D: int
    V: int
    dtype: str
    provider: str
    ms: float | None = None
    x_dense: float | None = None  # time relative to dense torch
    spread: float | None = None
    peak_MiB: float | None = None
    peak_x_dense: float | None = None  # peak memory relative to dense torch, with gradients in both
    beyond_gradients_MiB: float | None = None
    err_loss: float | None = None
    err_dx: float | None = None
    err_dw: float | None = None
    reason: str = ""


def same_dtype_loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(F.linear(input, linear_weight), target, reduction=reduction)


def measure(
    shape: Shape, dtype: torch.dtype, names: Sequence[str], *, rounds: int, ms: float, commit: str | None
) -> list[CpuRow]:
    device = torch.device("cpu")
    here = environment(device, commit)
    problem = make_problem(shape, dtype=dtype, device=device, seed=0)
    prepare(problem, MODE)
    reference = make_reference(problem, MODE)

    rows: dict[str, CpuRow] = {}
    steps: dict[str, Step] = {}
    for name in ("dense", *names):
        row = CpuRow(here.gpu, torch.get_num_threads(), here.torch, here.commit, *shape, str(dtype)[6:], name)
        rows[name] = row
        try:
            step = _step(name, problem)
            row.err_loss, row.err_dx, row.err_dw = errors_of(step(), problem, reference)
            peak = peak_bytes(step, problem)
        except Exception as error:
            row.reason = str(error).splitlines()[0]
            continue
        steps[name] = step
        row.peak_MiB = peak / MIB
        row.beyond_gradients_MiB = (peak - MODE.gradient_bytes(shape, dtype.itemsize)) / MIB
    problem.clear_gradients()
    del reference

    def failed(name: str, error: Exception) -> None:
        rows[name].reason = str(error).splitlines()[0]

    for name, timing in time_steps(steps, device=device, rounds=rounds, ms=ms, on_failure=failed).items():
        rows[name].ms, rows[name].spread = timing
    dense = rows["dense"]
    for row in rows.values():
        if row.ms and dense.ms:
            row.x_dense = row.ms / dense.ms
        if row.peak_MiB and dense.peak_MiB:
            row.peak_x_dense = row.peak_MiB / dense.peak_MiB
    return list(rows.values())


def _step(name: str, problem: Problem) -> Step:
    if name == "dense":
        return step_of(same_dtype_loss, problem, MODE)
    return providers.provide(name, problem, MODE)


def main(argv: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser("python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--shapes", default="2048x512x32000,1024x512x32000")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--providers", default="ours,ours_6MiB,torch_chunked", help="next to dense")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ms", type=float, default=4000)
    parser.add_argument("--threads", type=int, default=None, help="torch's own choice when not given")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="cpu")
    parser.add_argument("--commit", default=None)
    options = parser.parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    here = environment(torch.device("cpu"), options.commit)
    path = options.out / here.slug / f"{options.name}.csv"
    say(f"{here.gpu}, {torch.get_num_threads()} threads, torch {here.torch}, commit {here.commit} -> {path}")
    names = providers.choose(options.providers)
    for shape in parse_shapes(options.shapes):
        for dtype in options.dtypes.split(","):
            rows = measure(
                shape, getattr(torch, dtype), names, rounds=options.rounds, ms=options.ms, commit=options.commit
            )
            KeepingReport(path, **shape._asdict(), dtype=dtype).add(rows)
            say(f"\n{shape} {dtype}          ms  x dense      MiB  x dense   beyond   err dX   err dW")
            for row in rows:
                say(_line(row))
    return path


def _line(row: CpuRow) -> str:
    if row.ms is None:
        return f"without {row.provider}: {row.reason}"
    return (
        f"{row.provider:24}{row.ms:9.1f}{row.x_dense or 0:9.3f}{row.peak_MiB:9.1f}{row.peak_x_dense or 0:9.3f}"
        f"{row.beyond_gradients_MiB:9.1f}{row.err_dx:9.1e}{row.err_dw:9.1e}"
    )


if __name__ == "__main__":
    main()
