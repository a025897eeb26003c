"""A small Llama in a zero-bubble pipeline with two stages a rank, for benchmarks.distributed.

A step is forward and backward of all micro-batches. The last stage's loss makes its gradients in forward, or leaves
them to backward, or is F.cross_entropy of float32 logits. Needs torch 2.13: the schedules of 2.11 take no autograd
Function that joins input and parameters.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.utils.flop_counter import FlopCounterMode

import flce_ops
from benchmarks.llama import Llama, LlamaSize
from benchmarks.ranks import Clock
from benchmarks.report import Environment
from benchmarks.weak_scaling import WeakScalingRow, measured

HEADS = ("flce_ops", "flce_ops in backward", "F.cross_entropy")


@dataclass
class PipelineRow(WeakScalingRow):
    forward_passes: float | None = None  # FLOPs of the head's loss in units of 2 N D V
    input_passes: float | None = None  # of the backward that asks for the input's gradient
    weight_passes: float | None = None


def stage_of(size: LlamaSize, place: int, stages: int) -> Llama:
    part = Llama(size._replace(depth=size.depth // stages), fused_head=True).bfloat16()
    if place > 0:
        part.embed = nn.Identity()
    if place < stages - 1:
        part.norm = part.head = nn.Identity()
    part.forward = part.hidden_states
    return part


def pipeline_rows(size: LlamaSize, clock: Clock, found: Environment) -> list[PipelineRow]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    stages, micro_batches = 2 * ranks, 4 * ranks
    torch.manual_seed(0)
    with clock.device:
        parts = {place: stage_of(size, place, stages) for place in (rank, stages - 1 - rank)}
        tokens = torch.randint(size.vocab, (micro_batches * size.sequences, size.context))
        hidden = torch.randn(size.sequences, size.context, size.dim, dtype=torch.bfloat16, requires_grad=True)
    last, target, rows = parts.get(stages - 1), tokens.roll(-1, 1), []
    for name in HEADS:
        block = flce_ops.gradients_in_backward if "backward" in name else nullcontext
        runner = ScheduleZBVZeroBubble(
            [PipelineStage(part, place, stages, clock.device) for place, part in parts.items()],
            n_microbatches=micro_batches,
            loss_fn=lambda x, y: last.loss(x, y),
        )

        def step(runner=runner, block=block) -> Tensor:
            losses: list[Tensor] = []
            with block():
                runner.step(*([tokens] if last else []), **({"target": target, "losses": losses} if last else {}))
            for part in parts.values():
                part.zero_grad()
            return sum(losses, torch.zeros((), device=clock.device)) / micro_batches

        row = PipelineRow(**vars(found), ranks=ranks, head=name, tokens_per_rank=tokens.numel() // ranks)
        if last:
            last.fused_head = "flce" in name
            counts = [FlopCounterMode(display=False) for _ in range(3)]
            with block(), counts[0]:
                loss = last.loss(hidden * 1.0, target[: size.sequences])
            for counter, leaf in zip(counts[1:], (hidden, last.head.weight)):
                with counter:
                    torch.autograd.grad(loss, leaf, retain_graph=True)
            del loss  # and what it saved
            passes = [counter.get_total_flops() / (2 * hidden.numel() * size.vocab) for counter in counts]
            row.forward_passes, row.input_passes, row.weight_passes = passes
        rows.append(measured(row, step, clock))
    return rows
