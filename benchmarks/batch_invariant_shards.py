"""What batch_invariant=True costs over a sharded vocabulary, and whether results then have the bits of one rank.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.batch_invariant_shards
    torchrun --standalone --nproc-per-node 2 -m benchmarks.batch_invariant_shards --toy     # gloo on a CPU: seconds

    loss               linear_cross_entropy of a sharded weight and replicated tokens, forward and backward
    log_probs          linear_log_probs with entropies, forward and backward
    log_probs, values  the same without gradients, as an engine calls it
    ..., batch_invariant   the same with the option

x_before is the median over the rounds of a step's time over its counterpart's in the same round; the order of the steps
is shuffled in every round, and the slowest rank counts. `numbers` counts losses of tokens, log-probabilities and
entropies, with the option; `differ` those that have other bits than one rank's with the option, which holds the whole
weight. Shards start at a multiple of a tile (256 classes on Hopper). Rows for other numbers of ranks are kept in
batch_invariant_shards.csv.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import flce_ops

from .batch_invariance import bits
from .data import Problem, make_problem
from .ranks import Clock, common_parser, guarded, process_group, release, setting_of
from .report import Environment, KeepingReport, say, table_of
from .shapes import Shape, parse_shapes

# N tokens, D hidden, V vocabulary

SHAPES = "8192x4096x131072,8192x4096x128000"
TOY_SHAPES = "37x24x1024"
STEPS = ("loss", "log_probs", "log_probs, values")
WITH = ", batch_invariant"
COMPARED = "results of tokens"


@dataclass
class ShardsRow(Environment):
    ranks: int
    N: int
    D: int
    V: int
    dtype: str
    step: str
    before: str
    ms: float | None = None
    x_before: float | None = None
    spread: float | None = None
    numbers: int | None = None
    differ: int | None = None
    reason: str = ""


class ShardedProblem:
    def __init__(self, shape: Shape, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device) -> None:
        self.problem: Problem = make_problem(shape, dtype=dtype, device=device, seed=1)  # the same on every rank
        weight = self.problem.linear_weight
        rows = -(-shape.V // mesh.size())
        own = weight[mesh.get_rank() * rows :][:rows].clone()
        options = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
        self.weight = DTensor.from_local(own, mesh, [Shard(0)], **options).requires_grad_()
        self.input = DTensor.from_local(self.problem.input, mesh, [Replicate()], run_check=False).requires_grad_()

    def steps(self) -> dict[str, Callable[[], object]]:
        def step_of(name: str, invariant: bool) -> Callable[[], object]:
            def step() -> None:
                self.weight.grad = self.input.grad = None
                target = self.problem.target
                if name == "loss":
                    flce_ops.linear_cross_entropy(self.input, self.weight, target, batch_invariant=invariant).backward()
                    return
                with torch.set_grad_enabled(name == "log_probs"):
                    found = flce_ops.linear_log_probs(
                        self.input, self.weight, target, entropy=True, batch_invariant=invariant
                    )
                    if name == "log_probs":
                        (found.log_probs.sum() + 0.1 * found.entropy.sum()).backward()

            return step

        return {name + more: step_of(name, bool(more)) for name in STEPS for more in ("", WITH)}

    def results(self, input: Tensor, weight: Tensor) -> list[Tensor]:
        """What belongs to one token each, with gradients wanted and without."""
        target, found = self.problem.target, []
        for wanted in (True, False):
            operands = (input.detach().requires_grad_(wanted), weight.detach().requires_grad_(wanted))
            losses = flce_ops.linear_cross_entropy(*operands, target, reduction="none", batch_invariant=True)
            found += [losses, *flce_ops.linear_log_probs(*operands, target, entropy=True, batch_invariant=True)]
        valid = self.problem.valid  # an ignored token's entropy is 0 or -0
        parts = [part for part in found if part is not None]
        return [(part.full_tensor() if isinstance(part, DTensor) else part).detach()[valid] for part in parts]

    def compare(self) -> tuple[int, int]:
        """(numbers, how many of them differ from one rank's)"""
        mine = self.results(self.input, self.weight)
        one = self.results(self.problem.input, self.problem.linear_weight)
        differ = sum(int((bits(a) != bits(b)).sum()) for a, b in zip(mine, one, strict=True))
        return sum(part.numel() for part in mine), differ


def paired(clock: Clock, steps: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Milliseconds of every step in every round, in the order of the rounds."""
    names, times, calls = list(steps), {name: [] for name in steps}, {}
    for name in names:
        clock.seconds(steps[name], 2)
        calls[name] = max(2, min(200, round(clock.ms / max(1e3 * clock.seconds(steps[name], 2), 1e-3))))
    shuffle = random.Random(0)  # the same order on all ranks, because the steps contain collectives
    for _ in range(clock.rounds):
        for name in shuffle.sample(names, len(names)):
            clock.seconds(steps[name], max(1, calls[name] // 3))  # warms the card up
            times[name].append(1e3 * clock.seconds(steps[name], calls[name]))
    return times


def measure(shape: Shape, mesh: DeviceMesh, clock: Clock, found: Environment, dtype: torch.dtype) -> list[ShardsRow]:
    problem = ShardedProblem(shape, mesh, dtype, clock.device)
    setting = {**vars(found), "ranks": mesh.size(), **shape._asdict(), "dtype": str(dtype).removeprefix("torch.")}
    rows = {}
    for name, step in problem.steps().items():
        before = name.removesuffix(WITH) if name.endswith(WITH) else ""
        rows[name] = row = ShardsRow(**setting, step=name, before=before)
        row.reason = guarded(step, clock)[0] or ""
    release(clock.device)
    compared: dict[str, int] = {}

    def compare() -> None:
        compared["numbers"], compared["differ"] = problem.compare()

    reason = guarded(compare, clock)[0] or ""
    if not reason:
        compared["differ"] = int(clock.largest(compared["differ"]))
    rows[COMPARED] = ShardsRow(**setting, step=COMPARED, before="", reason=reason, **({} if reason else compared))
    times = paired(clock, {name: step for name, step in problem.steps().items() if not rows[name].reason})
    for name, own in times.items():
        row = rows[name]
        row.ms = statistics.median(own)
        if row.before in times:
            ratios = [mine / other for mine, other in zip(own, times[row.before], strict=True)]
            row.x_before = statistics.median(ratios)
            if len(ratios) > 1:
                first, _, third = statistics.quantiles(ratios, n=4)
                row.spread = (third - first) / 2
    return list(rows.values())


def table(rows: list[ShardsRow]) -> str:
    columns = [("ms", 9, ".3f"), ("x_before", 10, ".3f"), ("spread", 9, ".3f"), ("numbers", 9, "d"), ("differ", 8, "d")]
    return table_of(rows, columns, heading="step", width=36, name_of=lambda row: row.step)


def main() -> None:
    options = common_parser(__doc__, rounds=9, ms=120.0).parse_args()
    options.shapes = options.shapes or (TOY_SHAPES if options.toy else SHAPES)
    with process_group(options.toy) as device:
        run(options, device)


def run(options: argparse.Namespace, device: torch.device) -> None:
    found, dtype, clock, out, _ = setting_of(options, device)
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("ranks",))
    for shape in parse_shapes(options.shapes):
        rows = measure(shape, mesh, clock, found, dtype)
        release(device)
        if dist.get_rank() == 0:
            path = out / "batch_invariant_shards.csv"
            KeepingReport(path, ranks=size, **shape._asdict()).add(rows)
            say(f"{shape} {rows[0].dtype} over {size} ranks\n{table(rows)}")


if __name__ == "__main__":
    main()
