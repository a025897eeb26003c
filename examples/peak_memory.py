"""Peak memory of one call, from the allocator's own records."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

MIB = 2**20


def temporary_mib(call: Callable[[], object], device: torch.device) -> float:
    """The most memory that `call` held at once, minus what it leaves behind (its gradients), in MiB."""
    peak, left = _cuda(call) if device.type == "cuda" else _cpu(call)
    return (peak - left) / MIB


def _cuda(call: Callable[[], object]) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak, left = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result  # held until here, so that it counts as left behind
    return peak - before, left - before


def _cpu(call: Callable[[], object]) -> tuple[int, int]:
    """The profiler's trace has every allocation (+) and release (-) on the CPU. The peak is the maximum of their
    running sum.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler prints its start and stop
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    del result
    return peak, held
