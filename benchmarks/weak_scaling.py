"""A small Llama under FSDP2 with the same work for each GPU, its head by this package or F.cross_entropy: for
benchmarks.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.llama import Llama, LlamaSize, fully_sharded
from benchmarks.ranks import Clock, guarded, release
from benchmarks.report import Environment

LLAMA = LlamaSize(dim=2048, depth=8, heads=16, hidden=5632, vocab=128256, context=4096, sequences=2)
TOY_LLAMA = LlamaSize(dim=32, depth=2, heads=2, hidden=64, vocab=517, context=16, sequences=2)


@dataclass
class WeakScalingRow(Environment):
    ranks: int
    head: str
    tokens_per_rank: int
    parameters_M: float | None = None
    ms: float | None = None
    spread: float | None = None
    tokens_per_s: float | None = None  # over all ranks
    tokens_per_s_per_rank: float | None = None
    peak_MiB: float | None = None
    loss: float | None = None
    reason: str = ""


Row = TypeVar("Row", bound=WeakScalingRow)


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

    return measured(row, step, clock)


def measured(row: Row, step: Callable[[], Tensor], clock: Clock) -> Row:
    losses: list[Tensor] = []
    failure, row.peak_MiB = guarded(lambda: losses.extend(step() for _ in range(3)), clock)
    if failure is not None:
        row.reason = failure
        return row
    if clock.device.type == "cuda":
        row.peak_MiB = clock.largest(torch.cuda.max_memory_allocated() / 2**20)
    row.loss = losses[-1].item()
    ((row.ms, row.spread),) = clock.time({row.head: step}).values()
    row.tokens_per_s_per_rank = row.tokens_per_rank / (1e-3 * row.ms)
    row.tokens_per_s = row.ranks * row.tokens_per_s_per_rank
    return row
