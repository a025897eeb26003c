"""Peak memory of one step, minus what was allocated before. It includes the step's gradients, which did not exist
before.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from .data import Problem
from .modes import Step

MIB = 2**20


def peak_bytes(step: Step, problem: Problem) -> int:
    """The peak of a warm step: the first step also compiles, and opens library handles that keep their workspace."""
    problem.clear_gradients()
    if problem.input.device.type == "cuda":
        return peak_bytes_cuda(step)
    return _peak_bytes_cpu(step)


def peak_bytes_cuda(step: Step) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _peak_bytes_cpu(step: Step) -> int:
    """The CPU allocator records no peak, but the profiler records every allocation and release: the maximum of their
    running sum.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    allocated = peak = 0
    for _, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return peak
