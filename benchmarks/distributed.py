"""Several GPUs: a vocabulary-parallel step against its ideal, and a small Llama in a zero-bubble pipeline and under
FSDP2, on growing numbers of GPUs.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.distributed              # all parts, and again with 4, 2, 1
    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --toy        # gloo on a CPU: seconds
    torchrun --standalone --nproc-per-node 4 -m benchmarks.distributed --parts vocabulary --shapes 16384x4096x128256

    vocabulary        vocabulary_parallel.py    -> benchmarks/results/<gpu>/distributed_vocabulary.csv
    pipeline          pipeline.py               -> benchmarks/results/<gpu>/distributed_pipeline.csv
    weak_scaling      weak_scaling.py           -> benchmarks/results/<gpu>/distributed_weak_scaling.csv

Rows for other numbers of GPUs that are already in the files are kept.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.command import command
from benchmarks.pipeline import pipeline_rows
from benchmarks.ranks import Clock, process_group, release
from benchmarks.report import KeepingReport, environment, say, table_of
from benchmarks.shapes import parse_shapes
from benchmarks.vocabulary_parallel import bus_bandwidth, vocabulary_rows
from benchmarks.weak_scaling import LLAMA, TOY_LLAMA, weak_scaling_row

SHAPES, TOY_SHAPES = "16384x4096x128256,16384x8192x256000", "48x32x517"


def parser() -> argparse.ArgumentParser:
    made = command("distributed", __doc__, rounds=3, ms=400.0, parts="vocabulary,pipeline,weak_scaling")
    made.add_argument("--shapes", help=f"NxDxV,...; the ranks divide N; {SHAPES}")
    made.add_argument("--toy", action="store_true", help="sizes for gloo on a CPU")
    made.add_argument("--compile", action="store_true", help="weak scaling also with compiled blocks")
    return made


def main() -> None:
    options = parser().parse_args()
    with process_group(options.toy) as device:
        run(options, device)


def run(options: argparse.Namespace, device: torch.device) -> None:
    found, out = environment(device, options.commit), options.out / environment(device).slug
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = Clock(device, rounds=1 if options.toy else options.rounds, ms=20 if options.toy else options.ms)
    shapes = parse_shapes(options.shapes or (TOY_SHAPES if options.toy else SHAPES))
    size, first = dist.get_world_size(), dist.get_rank() == 0
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))
    if first:
        say(f"{size} x {found.gpu}, torch {found.torch}, triton {found.triton}, commit {found.commit}")
    every = [("loss", 12, ".5f"), ("peak_MiB", 12, ".1f")]

    if "vocabulary" in options.parts:
        bandwidth = bus_bandwidth(clock, 1 if options.toy else 256)
        for shape in shapes:
            rows = vocabulary_rows(shape, mesh, clock, found, dtype, bandwidth)
            release(device)
            if first:
                path = out / "distributed_vocabulary.csv"
                KeepingReport(path, ranks=size, torch=found.torch, **shape._asdict()).add(rows)
                columns = [("ms", 10, ".3f"), ("x_ideal", 9, ".3f"), ("gemm_ms", 9, ".3f"), *every]
                columns += [("communication_ms", 18, ".3f"), ("all_reduce_GBps", 17, ".0f"), ("grad_norm", 12, ".4e")]
                say(table_of(rows, columns, heading=f"{shape}", width=18, name_of=lambda row: row.provider))

    if "pipeline" in options.parts and size > 1:
        model = TOY_LLAMA._replace(depth=2 * size) if options.toy else LLAMA._replace(sequences=1)
        rows = pipeline_rows(model, clock, found)
        release(device)
        if first:
            KeepingReport(out / "distributed_pipeline.csv", ranks=size, torch=found.torch).add(rows)
            columns = [("ms", 10, ".3f"), *((name, 9, ".4g") for name in ("forward_passes", "input_passes"))]
            columns += [("weight_passes", 9, ".4g"), ("tokens_per_s", 14, ",.0f"), *every]
            say(table_of(rows, columns, heading="pipeline", width=32, name_of=lambda row: row.head))

    if "weak_scaling" in options.parts:
        for compiled, head in itertools.product((False, True)[: 1 + options.compile], ("flce_ops", "F.cross_entropy")):
            row = weak_scaling_row(TOY_LLAMA if options.toy else LLAMA, head, mesh, clock, found, compiled)
            release(device)
            if first:
                path = out / "distributed_weak_scaling.csv"
                KeepingReport(path, ranks=size, torch=found.torch, head=row.head).add([row])
                columns = [
                    ("ms", 10, ".3f"),
                    ("tokens_per_s", 14, ",.0f"),
                    ("tokens_per_s_per_rank", 23, ",.0f"),
                    *every,
                ]
                say(table_of([row], columns, heading="", width=26, name_of=lambda row: row.head))


if __name__ == "__main__":
    main()
