"""A vocabulary-parallel step, in several ways, against its ideal: a part of benchmarks.distributed.

One step = loss, d input, d weight:

    ours              weight Shard(0), tokens replicated; O(N) numbers in forward, one all_reduce of d input in backward
    ours_sequence     the same with tokens sharded: all_gather of the input, reduce_scatter of its gradient
    loss_parallel     torch: F.linear into sharded logits, F.cross_entropy in torch's loss_parallel, logits as float32
    gather_weight     tokens sharded; the weight is gathered and its gradient scattered around this package's loss
    ideal             bare GEMMs of one rank (logits, d input, d weight) + bytes divided by the bandwidth measured here

D hidden, N tokens, V vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import flce_ops
from benchmarks.ranks import Clock, guarded, release
from benchmarks.report import Environment
from benchmarks.shapes import Shape

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
    all_reduce_GBps: float | None = None  # bus bandwidth with 256 MiB
    peak_MiB: float | None = None  # beyond weight and input, the largest over ranks
    loss: float | None = None
    grad_norm: float | None = None  # norm of the input's gradient
    reason: str = ""


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

    def gemms(self) -> dict[str, Callable[[], object]]:
        """The three GEMMs of one rank, on full-size operands."""
        x, w = self.input.to_local().detach(), self.weight.to_local().detach()
        gradient = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device).normal_()
        out = torch.empty_like(gradient)
        return {
            "logits": lambda: torch.mm(x, w.T, out=out),
            "d_input": lambda: torch.mm(gradient, w),
            "d_weight": lambda: torch.mm(gradient.T, x),
        }


def bus_bandwidth(clock: Clock, mib: int) -> float | None:
    """Bytes per second that an all_reduce moves through each rank; None with one rank."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return None
    buffer = torch.zeros(mib << 18, device=clock.device)  # float32
    (ms, _) = clock.time({"all_reduce": lambda: dist.all_reduce(buffer)})["all_reduce"]
    return buffer.numel() * 4 * 2 * (ranks - 1) / ranks / (1e-3 * ms)


def communication_seconds(shape: Shape, ranks: int, itemsize: int, bandwidth: float | None) -> float:
    """all_gather of two float32 for each token and rank, and all_reduce of (N, D)."""
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
        failure, row.peak_MiB = guarded(lambda step=step: (step(), step())[-1], clock)
        if failure is not None:
            row.reason = failure
            problem.clear()
            release(clock.device)
            continue
        loss = step()
        row.loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
        used = problem.input if problem.input.grad is not None else problem.input_shard
        row.grad_norm = used.grad.full_tensor().float().norm().item()
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
