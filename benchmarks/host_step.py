"""`python -m benchmarks.host_step [CHECKOUT]`: the host's part of a training step, and the kernels that it launches.

    2048          2048 tokens in every step, D = 512, V = 32000
    64 to 4096    another number of tokens in every step, none of them twice
    kernels       what one step launches on the GPU, at two shapes

host_ms is the time from the call of a step (loss and backward) to its return, with the GPU idle before it: the median
over all steps, and their lower quartile. wall_ms is the time of a step in a loop that waits for the GPU only at its
end. flce_ops comes from CHECKOUT, the benchmark from here. torch.compile is dynamic where N changes. QuACK takes
multiples of 8 alone, so its numbers of tokens are such. If a library is missing, its row has the reason.
"""

from __future__ import annotations

import argparse
import collections
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import providers
from .command import command, report_of
from .data import Problem, make_problem
from .loops import numbers_of_tokens, wall_time, warm_steps
from .modes import MODES, Step, prepare
from .report import REPOSITORY, Environment, commit_of, environment, reason_of, say, table_of
from .run import one_compilation_per_shape
from .shapes import Shape, parse_shapes
from .timing import synchronize

# N tokens, D hidden, V vocabulary

MODE = MODES["fwd_bwd"]


@dataclass
class HostRow(Environment):
    python: str
    provider: str
    version: str
    tokens: str  # of a step: a number, or a range
    D: int
    V: int
    host_ms: float | None = None
    host_quartile_ms: float | None = None
    wall_ms: float | None = None
    calls: int | None = None  # calls of Python functions in a step
    kernels: int | None = None  # launched in a step
    copies: int | None = None  # and fills of memory
    gpu_ms: float | None = None  # sum over kernels
    reason: str = ""


def host_times(steps: Sequence[Step], device: torch.device) -> list[float]:
    """The milliseconds from call to return of each step."""
    host = []
    for step in steps:
        synchronize(device)
        began = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - began))
    return host


def python_calls(step: Step) -> int:
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    with torch.autograd.set_multithreading_enabled(False):  # so that backward's calls are counted, too
        sys.setprofile(count)
        step()
        sys.setprofile(None)
    return calls


def launched(step: Step) -> list[dict]:
    """The GPU's work in one step: events of torch.profiler's trace."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def time_loops(rows: dict[str, HostRow], problem: Problem, fixed: bool, options: argparse.Namespace) -> None:
    """The providers take turns in every round."""
    device, step_of, tokens, found = problem.input.device, {}, {}, {}
    least = problem.shape.N if fixed else min(options.least, problem.shape.N)
    for name, row in rows.items():
        if fixed:
            tokens[name] = [least] * 8, [[least] * options.steps] * (2 * options.rounds)
        else:
            tokens[name] = numbers_of_tokens(name, least, problem.shape.N, options.steps, 2 * options.rounds)
        try:
            step_of[name] = warm_steps(name, MODE, problem, tokens[name][0], None if fixed else True)
            row.version = providers.version(name)
            row.calls = python_calls(step_of[name](tokens[name][0][0]))
            found[name] = [], []
        except Exception as error:
            row.reason = reason_of(error)
        problem.clear_gradients()
    for number in range(options.rounds):
        for name in random.Random(number).sample(list(found), len(found)):
            one, other = (list(map(step_of[name], tokens[name][1][2 * number + loop])) for loop in (0, 1))
            found[name][0].extend(host_times(one, device))
            found[name][1].append(wall_time(other, device))
            problem.clear_gradients()
    for name, (host, walls) in found.items():
        row = rows[name]
        row.host_ms, row.wall_ms = statistics.median(host), statistics.median(walls)
        row.host_quartile_ms = statistics.quantiles(host, n=4)[0] if len(host) > 1 else host[0]


def count_kernels(rows: dict[str, HostRow], problem: Problem, named: bool) -> None:
    for name, row in rows.items():
        try:
            step = providers.provide(name, problem, MODE)
            for _ in range(4):
                step()
            row.version, events = providers.version(name), launched(step)
        except Exception as error:
            row.reason = reason_of(error)
            continue
        finally:
            problem.clear_gradients()
        kernels = [event for event in events if event["cat"] == "kernel"]
        row.kernels, row.copies = len(kernels), len(events) - len(kernels)
        row.gpu_ms = sum(event["dur"] for event in kernels) / 1e3
        if named:
            for kernel, count in collections.Counter(event["name"][:100] for event in kernels).most_common():
                ms = sum(event["dur"] for event in kernels if event["name"][:100] == kernel) / 1e3
                say(f"    {name:16}{count:4} x {kernel}, {ms:.3f} ms")


def measured(options: argparse.Namespace) -> Iterator[list[HostRow]]:
    device = torch.device(options.device)
    here = environment(device, options.commit or commit_of(options.checkout))
    machine = (here.gpu, here.torch, here.triton, here.commit, platform.python_version())
    names = providers.choose(options.providers)
    one_compilation_per_shape()

    def problem_of(shape: Shape) -> Problem:
        problem = make_problem(shape, dtype=torch.bfloat16, device=device, seed=0)
        prepare(problem, MODE)
        return problem

    (fixed,) = parse_shapes(options.shape)
    for shape, tokens in (
        (fixed, f"{fixed.N}"),
        (fixed._replace(N=options.most), f"{options.least} to {options.most}"),
    ):
        rows = {name: HostRow(*machine, name, "", tokens, shape.D, shape.V) for name in names}
        time_loops(rows, problem_of(shape), shape is fixed, options)
        yield list(rows.values())
    for shape in parse_shapes(options.kernels) if device.type == "cuda" else ():
        rows = {name: HostRow(*machine, name, "", f"{shape.N}", shape.D, shape.V) for name in names}
        count_kernels(rows, problem_of(shape), options.named)
        yield list(rows.values())


def main(argv: Sequence[str] | None = None) -> Path:
    parser = command("host_step", __doc__, providers="ours,torch_compile,quack_chunked,liger", rounds=3)
    parser.add_argument("checkout", nargs="?", type=Path, default=REPOSITORY, help="where flce_ops comes from")
    parser.add_argument("--shape", default="2048x512x32000", help="of the loop with one number of tokens")
    parser.add_argument("--least", type=int, default=64, help="tokens of the other loop; same D and V")
    parser.add_argument("--most", type=int, default=4096)
    parser.add_argument("--kernels", default="2048x512x32000,8192x4096x128256", help="shapes whose kernels are counted")
    parser.add_argument("--named", action="store_true", help="print the kernels by name")
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    options = parser.parse_args(argv)
    options.checkout = options.checkout.resolve()
    sys.path.insert(0, str(options.checkout))
    import flce_ops

    if Path(flce_ops.__file__).parent.parent != options.checkout:
        parser.error(f"expected flce_ops of {options.checkout}, got {flce_ops.__file__}: start in a fresh process")
    report = report_of("host_step", options)
    columns = [("host_ms", 9, ".3f"), ("host_quartile_ms", 18, ".3f"), ("wall_ms", 9, ".3f"), ("calls", 7, "d")]
    columns += [("kernels", 9, "d"), ("copies", 8, "d"), ("gpu_ms", 9, ".3f")]
    for rows in measured(options):
        report.add(rows)
        heading = f"{rows[0].tokens} x {rows[0].D} x {rows[0].V}"
        say(table_of(rows, columns, heading=heading, width=28, name_of=lambda row: row.provider))
    say(f"commit {rows[0].commit} -> {report.path}")
    return report.path


if __name__ == "__main__":
    main()
