"""Predicts memory and time of one training step of the head, for each way to run it, without running it.

    python -m flce_ops.plan --tokens 16384 --hidden 4096 --vocab 128256 --dtype bfloat16 --gpus 4

Memory follows from the kernels' own chunk sizes (step_cost.py, chunk_sizes.py). Time follows from a cost model with
measured rates (seconds.py, devices.py). A step computes the loss, and the gradients of the hidden states and of the
weight.
"""

from dataclasses import dataclass, replace

from ..support.integers import cdiv
from ..support.workspace import get_workspace, workspace
from .chunk_sizes import chunk_sizes_of_kernels
from .devices import Device, device_of
from .seconds import all_reduce_seconds, exchange_seconds, seconds
from .step_cost import (
    Head,
    StepCost,
    dense_compiled,
    dense_eager,
    one_pass,
    per_token,
    vocabulary_parallel,
)

__all__ = ["Device", "Head", "Option", "device_of", "plan"]

# N tokens, D hidden, V vocabulary, R ranks

SMALL_WORKSPACE = 64 << 20


@dataclass(frozen=True)
class Option:
    """One line of the plan. Bytes and seconds are those of one GPU."""

    name: str
    path: str
    tokens: int  # of all GPUs together
    temporaries: int  # bytes beyond the weight, the hidden states and their gradients
    peak: int  # bytes including those
    seconds: float
    behind_blocks: float = 0.0  # seconds of communication that can overlap with other layers; not part of `seconds`


@chunk_sizes_of_kernels()
def plan(head: Head, gpus: int, device: Device) -> list[Option]:
    """The options for a step. `head.tokens` is the tokens of each data-parallel rank, or of all ranks together if they
    share the vocabulary.
    """
    options = [
        on_one_gpu("F.cross_entropy, float32 logits", head, dense_eager(head), device),
        on_one_gpu("F.cross_entropy, torch.compile", head, dense_compiled(head), device),
        on_one_gpu(f"flce_ops, workspace {get_workspace() >> 20} MiB", head, one_pass(head), device),
    ]
    with workspace(SMALL_WORKSPACE):
        name = f"flce_ops, workspace {SMALL_WORKSPACE >> 20} MiB"
        options.append(on_one_gpu(name, head, one_pass(head), device))
    options.append(on_one_gpu('flce_ops, reduction="none"', head, per_token(head), device))
    if gpus > 1:
        options += [over_the_vocabulary(head, gpus, device), fully_sharded(head, gpus, device)]
    return options


def on_one_gpu(name: str, head: Head, cost: StepCost, device: Device) -> Option:
    held = 2 * (head.weight_bytes + head.input_bytes)
    return Option(name, cost.path, head.tokens, cost.temporaries, held + cost.temporaries, seconds(head, cost, device))


def over_the_vocabulary(head: Head, ranks: int, device: Device) -> Option:
    """Each rank has a shard of the weight and all tokens. The gradient of the hidden states is summed over ranks."""
    shard = head.shard(ranks)
    local = on_one_gpu(f"flce_ops, vocabulary over {ranks} GPUs", shard, vocabulary_parallel(shard), device)
    communication = all_reduce_seconds(head.input_bytes, ranks, device) + exchange_seconds(head.tokens, ranks, device)
    return replace(local, tokens=head.tokens, seconds=local.seconds + communication)


def fully_sharded(head: Head, ranks: int, device: Device) -> Option:
    """Each rank has its own tokens. The weight is gathered and its gradient scattered; the shards stay in memory beside
    them.
    """
    local = on_one_gpu(f"flce_ops, FSDP over {ranks} GPUs", head, one_pass(head), device)
    shards = 2 * cdiv(head.weight_bytes, ranks)
    gather_and_scatter = all_reduce_seconds(head.weight_bytes, ranks, device)
    return replace(local, tokens=ranks * head.tokens, peak=local.peak + shards, behind_blocks=gather_and_scatter)
