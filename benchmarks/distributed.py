"""Several GPUs: a vocabulary-parallel step against its ideal, and a small Llama under FSDP2 on growing numbers of GPUs.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.distributed              # both parts, and again with 4, 2, 1
    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --toy        # gloo on a CPU: seconds
    torchrun --standalone --nproc-per-node 4 -m benchmarks.distributed --parts vocabulary --shapes 16384x4096x128256

    vocabulary        vocabulary_parallel.py    -> benchmarks/results/<gpu>/distributed_vocabulary.csv
    weak_scaling      weak_scaling.py           -> benchmarks/results/<gpu>/distributed_weak_scaling.csv

Rows for other numbers of GPUs that are already in the files are kept.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.ranks import common_parser, process_group, release, setting_of
from benchmarks.report import KeepingReport, say
from benchmarks.vocabulary_parallel import bus_bandwidth, vocabulary_rows
from benchmarks.weak_scaling import LLAMA, TOY_LLAMA, weak_scaling_row


def parser() -> argparse.ArgumentParser:
    made = common_parser(__doc__, rounds=3, ms=400.0)
    made.add_argument("--parts", default="vocabulary,weak_scaling")
    made.add_argument("--compile", action="store_true", help="weak scaling also with compiled blocks")
    return made


def main() -> None:
    options = parser().parse_args()
    with process_group(options.toy) as device:
        run(options, device)


def run(options: argparse.Namespace, device: torch.device) -> None:
    found, dtype, clock, out, shapes = setting_of(options, device)
    size, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))
    parts = options.parts.split(",")
    if unknown := set(parts) - {"vocabulary", "weak_scaling"}:
        sys.exit(f"expected --parts of vocabulary, weak_scaling; got {', '.join(sorted(unknown))}")
    if first:
        say(f"{size} x {found.gpu}, torch {found.torch}, triton {found.triton}, commit {found.commit}")

    if "vocabulary" in parts:
        bandwidth = bus_bandwidth(clock, 1 if options.toy else 256)
        for shape in shapes:
            rows = vocabulary_rows(shape, mesh, clock, found, dtype, bandwidth)
            release(device)
            if first:
                path = out / "distributed_vocabulary.csv"
                KeepingReport(path, ranks=size, torch=found.torch, **shape._asdict()).add(rows)
                say(f"\n{shape} on {size}: bus bandwidth {cell(bandwidth and bandwidth / 1e9)} GB/s")
                for row in rows:
                    say(
                        f"{row.provider:16}{cell(row.ms):>10} ms{cell(row.x_ideal):>8} x ideal{cell(row.peak_MiB):>12}"
                        f" MiB  loss {cell(row.loss, '.5f')}  |dX| {cell(row.grad_norm, '.4e')}  {row.reason}"
                    )
                say(f"  ideal = {cell(rows[0].gemm_ms)} ms of GEMMs + {cell(rows[0].communication_ms)} ms of bytes")

    if "weak_scaling" in parts:
        llama = TOY_LLAMA if options.toy else LLAMA
        for compiled in (False, True) if options.compile else (False,):
            for head in ("flce_ops", "F.cross_entropy"):
                row = weak_scaling_row(llama, head, mesh, clock, found, compiled)
                release(device)
                if first:
                    path = out / "distributed_weak_scaling.csv"
                    KeepingReport(path, ranks=size, torch=found.torch, head=row.head).add([row])
                    say(
                        f"{row.head:26}{cell(row.ms):>10} ms{cell(row.tokens_per_s, ',.0f'):>12} tokens/s"
                        f"{cell(row.tokens_per_s_per_rank, ',.0f'):>10} per rank{cell(row.peak_MiB, '.0f'):>9} MiB"
                        f"  loss {cell(row.loss, '.4f')}  {row.reason}"
                    )


def cell(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
