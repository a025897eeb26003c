"""`python -m benchmarks.first_call [CHECKOUT]`: the first steps of a training process.

    empty     empty caches: steps 1 to 4 of the first shape
    filled    a new process, with caches that hold the kernels: steps 1 to 4 of each shape
    tokens    a new process, with these caches: a step of each N of SEQUENCE, at another head

Each is a separate process, for one provider (and one shape). The clock starts when torch is imported, the GPU's context
exists, cuBLAS has run, and autograd has been given a gradient, for which torch imports sympy: 0.4 s. So no provider
pays for these; the first step includes the import of the library. The caches are Triton's, Inductor's and QuACK's.
Python's bytecode of PACKAGES is cached beforehand, as an installer does it, in a folder of this run: the installed
folder may be read-only. Compilations are the Triton kernels that a cache gained. flce_ops comes from CHECKOUT, the
benchmark from here. A row is written to the CSV as soon as it is measured. A process that takes too long, or for which
the budget leaves no time, becomes a row with a reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from . import providers
from .command import command, report_of
from .data import Problem, first_tokens, make_problem
from .modes import MODES, prepare
from .report import REPOSITORY, Environment, commit_of, environment, reason_of, say
from .shapes import Shape, parse_shapes
from .timing import synchronize

# N tokens, D hidden, V vocabulary

PACKAGES = ("triton", "torch", "liger_kernel", "cut_cross_entropy", "quack")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR")
SHAPES = "8192x4096x128256,65536x4096x128256,262144x4096x128256"
SEQUENCE = (2048, 2047, 2046, 1000, 128, 100, 17, 1, 20000)
STEPS = 4
SECONDS = 60.0  # time limit of a process


@dataclass
class FirstRow(Environment):
    provider: str
    version: str
    mode: str
    caches: str  # empty, filled, tokens
    N: int
    D: int
    V: int
    step: str = ""
    seconds: float | None = None
    compilations: int | None = None
    reason: str = ""  # why there is no number


def main(argv: Sequence[str] | None = None) -> Path | None:
    parser = command("first_call", __doc__, providers="ours,torch_compile,liger,cce", modes="fwd_bwd", shapes=SHAPES)
    parser.add_argument("checkout", nargs="?", type=Path, default=REPOSITORY, help="where flce_ops comes from")
    parser.add_argument("--many", default="20000x512x32000", help="the head of many N, and the largest N")
    parser.add_argument("--budget-s", type=float, default=240)
    parser.add_argument("--here", default=None, help=argparse.SUPPRESS)  # the row to measure in this process
    options = parser.parse_args(argv)
    if options.here:
        sys.path.insert(0, str(options.checkout))
        for row in told(FirstRow(**json.loads(options.here)), torch.device(options.device)):
            print(json.dumps(asdict(row)), flush=True)
        return None

    options.checkout = options.checkout.resolve()
    here = environment(torch.device(options.device), options.commit or commit_of(options.checkout))
    report = report_of("first_call", options)
    deadline = time.monotonic() + options.budget_s
    with tempfile.TemporaryDirectory() as bytecode:
        cache_bytecode(bytecode, options.checkout)
        for name in providers.choose(options.providers):
            for mode in options.modes.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    for caches, shape in stories(name, options):
                        asked = FirstRow(**asdict(here), provider=name, version="", mode=mode, caches=caches, **shape)
                        for row in in_fresh_process(asked, options, Path(folder), deadline - time.monotonic()):
                            report.add([row])
                            said = row.reason or f"{row.seconds:8.3f} s, {row.compilations} compilations"
                            say(f"{name:14}{mode:10}{caches:7}{row.N}x{row.D}x{row.V} {row.step:7}{said}")
                        if row.reason and not row.version:
                            break  # the library is missing
    say(f"-> {report.path}")
    return report.path


def stories(name: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, int]]]:
    shapes, (many,) = parse_shapes(options.shapes), parse_shapes(options.many)
    yield "empty", shapes[0]._asdict()
    for shape in shapes if name == "ours" else shapes[:1]:
        yield "filled", shape._asdict()
    yield "tokens", many._asdict()


def cache_bytecode(folder: str, checkout: Path) -> None:
    """Compiles flce_ops and PACKAGES to bytecode in `folder`, which the processes that follow use."""
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    found = [importlib.util.find_spec(package) for package in PACKAGES]
    folders = [place for spec in found if spec is not None for place in spec.submodule_search_locations]
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", checkout / "flce_ops", *folders]
    subprocess.run(command, cwd=REPOSITORY)


def in_fresh_process(asked: FirstRow, options: argparse.Namespace, folder: Path, left: float) -> Iterator[FirstRow]:
    limit = min(SECONDS, left)
    if limit < 5:
        yield replace(asked, reason="no time left")
        return
    command = [sys.executable, "-m", "benchmarks.first_call", str(options.checkout)]
    command += ["--here", json.dumps(asdict(asked)), "--device", options.device]
    env = {**os.environ, **{variable: str(folder / variable.lower()) for variable in CACHES}}
    with (folder / "stderr").open("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=REPOSITORY)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                yield FirstRow(**json.loads(line))
        in_time = timer.is_alive()
        timer.cancel()
        if process.wait():
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            yield replace(asked, reason=last if in_time else f"more than {limit:.0f} s")


def told(asked: FirstRow, device: torch.device) -> Iterator[FirstRow]:
    """Measures the rows of one process in this process."""
    mode = MODES[asked.mode]
    whole = make_problem(Shape(asked.N, asked.D, asked.V), dtype=torch.bfloat16, device=device, seed=0)
    prepare(whole, mode)

    def timed(step: str, problem: Problem) -> FirstRow:
        problem.clear_gradients()
        synchronize(device)
        before, start = compiled(), time.perf_counter()
        stepping(problem)()
        synchronize(device)
        seconds, version = time.perf_counter() - start, providers.version(asked.provider)
        found = {"seconds": seconds, "compilations": compiled() - before}
        return replace(asked, step=step, version=version, N=problem.shape.N, **found)

    ones = torch.ones(1, requires_grad=True)
    (2 * ones).backward(torch.ones(1))
    try:
        stepping = providers.stepping(asked.provider, mode)
        if asked.caches == "tokens":
            for tokens in SEQUENCE:
                yield timed("", first_tokens(whole, min(tokens, asked.N)))
        else:
            for number in range(STEPS):
                yield timed(f"step {number + 1}", whole)
    except Exception as error:
        yield replace(asked, reason=reason_of(error))


def compiled() -> int:
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


if __name__ == "__main__":
    main()
