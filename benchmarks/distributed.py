"""Several GPUs: a vocabulary-parallel step against its ideal, and a small Llama under FSDP2 at growing numbers of GPUs.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.distributed              # both parts, and again with 4, 2, 1
    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed --toy        # gloo on a CPU: seconds
    torchrun --standalone --nproc-per-node 4 -m benchmarks.distributed --parts vocabulary --shapes 16384x4096x128256

Part "vocabulary" (benchmarks/results/<gpu>/distributed_vocabulary.csv), one step = loss, d input, d weight:

    ours              weight Shard(0), tokens replicated; forward O(N) numbers, backward one all_reduce of d input
    ours_sequence     the same with tokens sharded: all_gather of the input, reduce_scatter of its gradient
    loss_parallel     torch: F.linear into sharded logits, F.cross_entropy in torch's loss_parallel, logits as float32
    gather_weight     tokens sharded, the weight gathered and its gradient scattered around our loss
    ideal             bare GEMMs of one rank (logits, d input, d weight) + bytes over the bandwidth measured here

Part "weak_scaling" (distributed_weak_scaling.csv): the same work per GPU, the head by us or by F.cross_entropy.
Rows of other numbers of GPUs already in the files are kept. D hidden, N tokens, V vocabulary, R ranks.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import flce_ops
from benchmarks.llama import Llama, LlamaSize, fully_sharded
from benchmarks.ranks import Clock, common_parser, process_group, setting_of
from benchmarks.report import Environment, KeepingReport, say
from benchmarks.shapes import Shape

LLAMA = LlamaSize(dim=2048, depth=8, heads=16, hidden=5632, vocab=128256, context=4096, sequences=2)
TOY_LLAMA = LlamaSize(dim=32, depth=2, heads=2, hidden=64, vocab=517, context=16, sequences=2)

Step = Callable[[], Tensor]  # one training step; returns the loss, the same on every rank


@dataclass
class VocabularyRow(Environment):
    ranks: int
    N: int
    D: int
    V: int
    dtype: str
    provider: str
    ms: float | None = None
    spread: float | None = None  # (slowest - fastest round) / median
    x_ideal: float | None = None
    ideal_ms: float | None = None  # gemm_ms + communication_ms
    gemm_ms: float | None = None  # three GEMMs of one rank
    communication_ms: float | None = None  # bytes / bandwidth
    all_reduce_GBps: float | None = None  # bus bandwidth, of 256 MiB
    peak_MiB: float | None = None  # beyond weight and input, largest over ranks
    loss: float | None = None
    grad_norm: float | None = None  # of the input's gradient
    reason: str = ""


@dataclass
class WeakScalingRow(Environment):
    ranks: int
    head: str
    tokens_per_rank: int
    parameters_M: float
    ms: float | None = None
    spread: float | None = None
    tokens_per_s: float | None = None  # of all ranks
    tokens_per_s_per_rank: float | None = None
    peak_MiB: float | None = None
    loss: float | None = None
    reason: str = ""


# ---------------------------------------------------------------- part 1: the vocabulary-parallel step


class VocabularyProblem:
    def __init__(self, shape: Shape, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device) -> None:
        N, D, V = shape
        generator = torch.Generator(device).manual_seed(0)
        self.mesh, self.shape = mesh, shape
        input = torch.randn(N, D, generator=generator, device=device).to(dtype)
        self.target = torch.randint(V, (N,), generator=generator, device=device)
        self.target[:: max(7, N // 300)] = -100
        rows = -(-V // mesh.size())
        first = min(mesh.get_rank() * rows, V)
        own = torch.Generator(device).manual_seed(1 + mesh.get_rank())
        shard = torch.randn(min(rows, V - first), D, generator=own, device=device).mul_(D**-0.5).to(dtype)
        options = {"run_check": False, "shape": (V, D), "stride": (D, 1)}
        self.weight = DTensor.from_local(shard, mesh, [Shard(0)], **options).requires_grad_()
        self.input = DTensor.from_local(input, mesh, [Replicate()], run_check=False).requires_grad_()
        part = self.input.detach().redistribute(mesh, [Shard(0)])
        self.input_shard = part.requires_grad_()

    def clear(self) -> None:
        self.weight.grad = self.input.grad = self.input_shard.grad = None

    def steps(self) -> dict[str, Step]:
        return {
            "ours": lambda: self.step(self.ours, self.input),
            "ours_sequence": lambda: self.step(self.ours, self.input_shard),
            "loss_parallel": self.loss_parallel_step,
            "gather_weight": lambda: self.step(self.gather_weight, self.input_shard),
        }

    def step(self, loss_of: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        self.clear()
        loss = loss_of(input)
        loss.backward()
        return loss.detach()

    def ours(self, input: DTensor) -> Tensor:
        return flce_ops.linear_cross_entropy(input, self.weight, self.target)

    def gather_weight(self, input: DTensor) -> Tensor:
        weight = self.weight.redistribute(self.mesh, [Replicate()])
        return flce_ops.linear_cross_entropy(input, weight, self.target)

    def loss_parallel_step(self) -> Tensor:
        self.clear()
        logits = F.linear(self.input, self.weight)  # (N, V) Shard(1)
        with loss_parallel():
            loss = F.cross_entropy(logits.float(), self.target)
            loss.backward()
        return loss.detach()

    def gradient_norm(self, input: DTensor) -> float:
        return input.grad.full_tensor().float().norm().item()

    def gemms(self) -> dict[str, Callable[[], object]]:
        """The three GEMMs of one rank on full-size operands."""
        x, w = self.input.to_local().detach(), self.weight.to_local().detach()
        gradient = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device).normal_()
        out = torch.empty_like(gradient)
        return {
            "logits": lambda: torch.mm(x, w.T, out=out),
            "d_input": lambda: torch.mm(gradient, w),
            "d_weight": lambda: torch.mm(gradient.T, x),
        }


def bus_bandwidth(clock: Clock, mib: int) -> float | None:
    """Bytes per second that an all_reduce moves through each rank; None on one rank."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    buffer = torch.zeros(mib << 18, device=clock.device)  # float32
    (ms, _) = clock.time({"all_reduce": lambda: dist.all_reduce(buffer)})["all_reduce"]
    return buffer.numel() * 4 * 2 * (ranks - 1) / ranks / (1e-3 * ms)


def communication_seconds(shape: Shape, ranks: int, itemsize: int, bandwidth: float | None) -> float:
    """all_gather of two float32 per token and rank, all_reduce of (N, D)."""
    if bandwidth is None:
        return 0.0
    share = (ranks - 1) / ranks
    return (2 * 4 * shape.N * ranks * share + itemsize * shape.N * shape.D * 2 * share) / bandwidth


def vocabulary_rows(
    shape: Shape, mesh: DeviceMesh, clock: Clock, found: Environment, dtype: torch.dtype, bandwidth: float | None
) -> list[VocabularyRow]:
    problem = VocabularyProblem(shape, mesh, dtype, clock.device)
    setting = {**vars(found), "ranks": mesh.size(), **shape._asdict(), "dtype": str(dtype).removeprefix("torch.")}
    rows = {}
    for name, step in problem.steps().items():
        rows[name] = row = VocabularyRow(**setting, provider=name)
        failure, peak = guarded(lambda step=step: (step(), step())[-1], clock)
        if failure is not None:
            row.reason = failure
            problem.clear()
            release(clock.device)
            continue
        row.peak_MiB = peak
        loss = step()
        row.loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
        used = problem.input if problem.input.grad is not None else problem.input_shard
        row.grad_norm = problem.gradient_norm(used)
        problem.clear()
        release(clock.device)
    gemm = {}
    failure, _ = guarded(lambda: gemm.update(clock.time(problem.gemms())), clock)
    release(clock.device)
    gemm_ms = None if failure else sum(ms for ms, _ in gemm.values())
    communication_ms = 1e3 * communication_seconds(shape, mesh.size(), dtype.itemsize, bandwidth)
    timed = clock.time({name: step for name, step in problem.steps().items() if not rows[name].reason})
    for name, (ms, spread) in timed.items():
        rows[name].ms, rows[name].spread = ms, spread
    if gemm_ms is not None:
        rows["ideal"] = VocabularyRow(**setting, provider="ideal", ms=gemm_ms + communication_ms)
    for row in rows.values():
        row.all_reduce_GBps = None if bandwidth is None else bandwidth / 1e9
        row.gemm_ms, row.communication_ms = gemm_ms, communication_ms
        if gemm_ms is not None:
            row.ideal_ms = gemm_ms + communication_ms
            row.x_ideal = None if row.ms is None else row.ms / row.ideal_ms
    return list(rows.values())


def guarded(run: Callable[[], object], clock: Clock) -> tuple[str | None, float | None]:
    """Runs it on every rank; (why it failed on any, None) or (None, peak MiB beyond what was allocated before)."""
    release(clock.device)
    cuda = clock.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    reason = ""
    try:
        run()
        clock.synchronize()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:160]}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    failed = [text for text in reasons if text]
    if failed:
        return failed[0], None
    return None, clock.largest((torch.cuda.max_memory_allocated() - before) / 2**20) if cuda else None


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ---------------------------------------------------------------- part 2: weak scaling


def weak_scaling_row(
    size: LlamaSize, head: str, mesh: DeviceMesh, clock: Clock, found: Environment, compiled: bool
) -> WeakScalingRow:
    release(clock.device)
    device = clock.device
    tokens_per_rank = size.sequences * size.context
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(size, fused_head=head == "flce_ops")
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    row = WeakScalingRow(
        **vars(found),
        ranks=mesh.size(),
        head=head + ("_compiled" if compiled else ""),
        tokens_per_rank=tokens_per_rank,
        parameters_M=parameters,
    )
    fully_sharded(model, mesh, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(mesh.get_rank())
    shape = (size.sequences, size.context)
    tokens = torch.randint(size.vocab, shape, generator=generator, device=device)
    target = tokens.roll(-1, 1)

    def step() -> Tensor:
        loss = model(tokens, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[Tensor] = []
    failure, row.peak_MiB = guarded(lambda: losses.extend(step() for _ in range(3)), clock)
    if failure is not None:
        row.reason = failure
        return row
    if device.type == "cuda":
        row.peak_MiB = clock.largest(torch.cuda.max_memory_allocated() / 2**20)
    row.loss = losses[-1].item()
    ((row.ms, row.spread),) = clock.time({head: step}).values()
    row.tokens_per_s = mesh.size() * tokens_per_rank / (1e-3 * row.ms)
    row.tokens_per_s_per_rank = tokens_per_rank / (1e-3 * row.ms)
    return row


# ---------------------------------------------------------------- the run


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
