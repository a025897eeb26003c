"""`python -m benchmarks.cpu`: forward and backward on a CPU, this package against torch in the same dtype.

torch_function is F.cross_entropy(F.linear(input, weight), target) without an upcast, which x_dense and peak_x_dense
divide by; torch_chunked is torch's own chunked loss. The method is that of the GPU benchmarks, with the wall clock.
Memory is the running sum of the allocations that torch.profiler records. The row of another shape or dtype that is
already in the file is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import providers, run
from .command import command
from .modes import MODES
from .report import KeepingReport, Row, environment, say
from .shapes import parse_shapes

# N tokens, D hidden, V vocabulary


@dataclass
class CpuRow(Row):
    threads: int = 0
    x_dense: float | None = None  # time relative to torch_function
    peak_x_dense: float | None = None  # peak memory relative to torch_function, with gradients in both


def main(argv: Sequence[str] | None = None) -> Path:
    chosen = {"shapes": "2048x512x32000,1024x512x32000", "providers": "torch_function,ours,ours_6MiB,torch_chunked"}
    parser = command("cpu", __doc__, **chosen, dtypes="float32,bfloat16", rounds=3, ms=4000.0, seed=0)
    parser.add_argument("--threads", type=int, default=None, help="torch's own choice when not given")
    options = parser.parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    cpu, names = torch.device("cpu"), providers.choose(options.providers)
    here = environment(cpu, options.commit)
    path = options.out / here.slug / "cpu.csv"
    for shape in parse_shapes(options.shapes):
        for dtype in options.dtypes.split(","):
            settings = run.Settings(cpu, getattr(torch, dtype), options.rounds, options.ms, options.seed)
            found = run.measure(shape, MODES["fwd_bwd"], names, settings, here, out_of_time=lambda: False)
            rows = [CpuRow(**vars(row), threads=torch.get_num_threads()) for row in found]
            dense = next((row for row in rows if row.provider == "torch_function" and row.ms), None)
            for row in rows if dense else ():
                row.x_dense = row.ms and row.ms / dense.ms
                row.peak_x_dense = row.peak_MiB and row.peak_MiB / dense.peak_MiB
            KeepingReport(path, **shape._asdict(), dtype=dtype).add(rows)
    say(f"-> {path}")
    return path


if __name__ == "__main__":
    main()
