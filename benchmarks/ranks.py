"""For benchmarks with several ranks: process group, and timing of steps against each other."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from benchmarks.report import reason_of
from benchmarks.timing import synchronize

# NVLink multicast, which NCCL uses where it can, needs the whole NVLink fabric of the host.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@contextmanager
def process_group(toy: bool) -> Iterator[torch.device]:
    """This rank's device: its GPU with NCCL, or the CPU with gloo. A process without torchrun is the only rank."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    for name, value in {**alone, **WITHOUT_MULTICAST}.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available() and not toy
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Clock:
    """Times steps against each other: back to back, in a new order in every round. The slowest rank counts."""

    def __init__(self, device: torch.device, *, rounds: int, ms: float) -> None:
        self.device, self.rounds, self.ms = device, rounds, ms
        self.shuffle = random.Random(0)  # the same order on all ranks, because the steps contain collectives

    def seconds(self, step: Callable[[], object], calls: int) -> float:
        """Seconds of a call on the slowest rank."""
        dist.barrier()
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(calls):
            step()
        synchronize(self.device)
        return self.largest((time.perf_counter() - started) / calls)

    def largest(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.item()

    def time(self, steps: dict[str, Callable[[], object]]) -> dict[str, tuple[float, float]]:
        """The median milliseconds and the spread of every step."""
        order, kept = list(steps), {name: [] for name in steps}
        calls = {}
        for name in order:
            self.seconds(steps[name], 1)
            calls[name] = max(2, min(1000, round(self.ms / max(1e3 * self.seconds(steps[name], 2), 1e-3))))
        for _ in range(self.rounds):
            self.shuffle.shuffle(order)
            for name in order:
                self.seconds(steps[name], max(1, calls[name] // 3))  # warms the card up
                kept[name].append(1e3 * self.seconds(steps[name], calls[name]))
        middles = {name: statistics.median(times) for name, times in kept.items()}
        return {name: (middles[name], (max(times) - min(times)) / middles[name]) for name, times in kept.items()}


def guarded(run: Callable[[], object], clock: Clock) -> tuple[str | None, float | None]:
    """Runs it on every rank. Returns (the reason of a failure on any rank, None), or (None, peak MiB beyond earlier
    allocations).
    """
    release(clock.device)
    cuda = clock.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    reason = ""
    try:
        run()
        synchronize(clock.device)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        reason = reason_of(error)
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
