"""`python -m benchmarks.first_call`: the first seconds of a training process, and the cost of new numbers of tokens.

    steps       empty caches: the first, second and third step of a head, then the first step of another head
    again       a new process with the caches that `steps` has filled: the first and second step of the head
    tokens      empty caches: a step, one for each N of SEQUENCE, and 200 of random N up to 20,000
    heads       empty caches, for each head of benchmarks.loads: its first step

Each of these is a separate process, for one provider and one function (and one head). The clock starts when torch is
imported, the GPU's context exists, cuBLAS has run, and autograd has been given a gradient, for which torch imports
sympy: 0.4 s. So no provider pays for these. The caches are Triton's, Inductor's and QuACK's. Python's bytecode of
PACKAGES is cached beforehand, as an installer does it, in a folder of this run: the installed folder may be read-only.
Compilations are the Triton kernels that a cache gained. A row is written to the CSV as soon as it is measured. A
process that takes too long, or for which the budget leaves no time, becomes a row with a reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from . import providers
from .data import Problem, make_problem
from .loads import units
from .modes import MODES, Mode, Step, prepare, step_of
from .report import REPOSITORY, Environment, Report, environment, say
from .shapes import Shape, parse_shapes

PACKAGES = ("flce_ops", "triton", "torch", "liger_kernel", "cut_cross_entropy", "quack")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "QUACK_CACHE_DIR")
MODE_OF = {"loss": "fwd_bwd", "log_probs": "log_probs"}  # log_probs includes the entropy
SECONDS = {"steps": 60.0, "again": 30.0, "tokens": 90.0, "heads": 30.0}  # time limit of each process
# a head; another head; a head for many N, with the largest N
SHAPES = "8192x4096x128256,12288x1536x50257,20000x512x32000"
SEQUENCE = (2048, 2047, 2046, 1000, 128, 100, 17, 1, 20000)
RANDOM, AT_A_TIME = 200, 50


@dataclass
class Row(Environment):
    provider: str
    version: str
    function: str
    story: str
    step: str = ""  # a step of the list above
    N: int | None = None
    D: int | None = None
    V: int | None = None
    seconds: float | None = None  # first steps include the import of the library; for random N the sum over a row
    slowest_s: float | None = None  # the slowest of these steps
    compilations: int | None = None
    bytecode: str = "cached"  # Python's
    reason: str = ""  # why there is no number


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.first_call", description=__doc__)
    parser.add_argument("--providers", default="ours,torch_compile,liger,cce")
    parser.add_argument("--functions", default=",".join(MODE_OF), help="log_probs: with the entropy")
    parser.add_argument("--stories", default="steps,again,tokens", help="and heads, two minutes a provider")
    parser.add_argument("--shapes", default=SHAPES, help="a head, another, that of many N with the largest N")
    parser.add_argument("--random", type=int, default=RANDOM, help="how many random N")
    parser.add_argument("--budget-s", type=float, default=145)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="first_call")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--here", default=None, help=argparse.SUPPRESS)  # the row to measure in this process
    options = parser.parse_args(argv)
    if options.here:
        for row in told(Row(**json.loads(options.here)), options):
            print(json.dumps(asdict(row)), flush=True)
        return

    here = environment(torch.device(options.device), options.commit)
    report, rows = Report(options.out / here.slug / f"{options.name}.csv"), []
    bytecode = tempfile.TemporaryDirectory()
    cache_bytecode(bytecode.name)
    deadline = time.monotonic() + options.budget_s
    for name in providers.choose(options.providers):
        for function in options.functions.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for story, sizes in stories(options.stories):
                    asked = Row(**asdict(here), provider=name, version="", function=function, story=story, **sizes)
                    for row in in_fresh_process(asked, options, Path(folder), deadline - time.monotonic()):
                        report.add([row])
                        rows.append(row)
                        say(f"{name:14}{function:10}{story:7}{row.step:22}", row.reason or cell([row]))
                    if row.reason and not row.version and story == options.stories.split(",")[0]:
                        break  # the library or the function is missing
    say("", *(table(rows, function) for function in options.functions.split(",")), sep="\n")


def stories(names: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Each story; that of heads for each head of the loads, with the shape that is named first."""
    for story in names.split(","):
        if story == "heads":
            heads: dict[tuple[int, int], Shape] = {}
            for unit in units():
                heads.setdefault((unit.shape.D, unit.shape.V), unit.shape)
            yield from ((story, shape._asdict()) for shape in heads.values())
        else:
            yield story, {}


def cache_bytecode(folder: str) -> None:
    """Compiles PACKAGES to bytecode in `folder`, and makes the processes that follow use the folder."""
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    found = [importlib.util.find_spec(package) for package in PACKAGES]
    folders = [place for spec in found if spec is not None for place in spec.submodule_search_locations]
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", *folders], cwd=REPOSITORY)


def in_fresh_process(asked: Row, options: argparse.Namespace, folder: Path, left: float) -> Iterator[Row]:
    limit = min(SECONDS[asked.story], left)
    if limit < 5:
        yield replace(asked, reason="no time left")
        return
    command = [sys.executable, "-m", "benchmarks.first_call", "--here", json.dumps(asdict(asked))]
    command += ["--shapes", options.shapes, "--random", str(options.random), "--device", options.device]
    caches = folder / {"tokens": "tokens", "heads": f"{asked.D}x{asked.V}"}.get(asked.story, "steps")
    env = {**os.environ, **{variable: str(caches / variable.lower()) for variable in CACHES}}
    with (folder / "stderr").open("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=REPOSITORY)
        timer = threading.Timer(limit, process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                yield Row(**json.loads(line))
        in_time = timer.is_alive()
        timer.cancel()
        if process.wait():
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            yield replace(asked, reason=last if in_time else f"more than {limit:.0f} s")


def told(asked: Row, options: argparse.Namespace) -> Iterator[Row]:
    """Measures the rows of one process in this process."""
    device, mode = torch.device(options.device), MODES[MODE_OF[asked.function]]
    head, other, many = parse_shapes(options.shapes)
    stepping = steps_of(asked.provider, mode)

    def timed(step: str, problem: Problem) -> Row:
        prepare(problem, mode)
        synchronize(device)
        before, start = compiled(), time.perf_counter()
        stepping(problem)()
        synchronize(device)
        seconds, version = time.perf_counter() - start, providers.version(asked.provider)
        sizes = problem.shape._asdict()
        return replace(asked, step=step, version=version, seconds=seconds, compilations=compiled() - before, **sizes)

    def problem_of(shape: Shape) -> Problem:
        return make_problem(shape, dtype=torch.bfloat16, device=device, seed=0)

    ones = torch.ones(1, requires_grad=True)
    (2 * ones).backward(torch.ones(1))
    try:
        if asked.story == "heads":
            yield timed("{N}x{D}x{V}".format(**asdict(asked)), problem_of(Shape(asked.N, asked.D, asked.V)))
            return
        if asked.story != "tokens":
            problem = problem_of(head)
            for step in ("first", "second", "third") if asked.story == "steps" else ("first", "second"):
                yield timed(step, problem)
            if asked.story == "steps":
                yield timed("another head", problem_of(other))
            return
        whole = problem_of(many)
        yield timed("first", first_tokens(whole, min(SEQUENCE[0], many.N)))
        for tokens in SEQUENCE:
            yield timed(f"N = {tokens}", first_tokens(whole, min(tokens, many.N)))
        draw = random.Random(0)
        for start in range(0, options.random, AT_A_TIME):
            count = min(AT_A_TIME, options.random - start)
            rows = [timed("random N", first_tokens(whole, draw.randint(1, many.N))) for _ in range(count)]
            seconds = [row.seconds for row in rows]
            compilations = sum(row.compilations for row in rows)
            some = {"seconds": sum(seconds), "slowest_s": max(seconds), "compilations": compilations}
            yield replace(rows[0], step=f"{count} random N", N=None, **some)
    except Exception as error:
        yield replace(asked, reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def steps_of(provider: str, mode: Mode) -> Callable[[Problem], Step]:
    """torch.compile as users have it: one function for all sizes, which becomes dynamic when they change."""
    if provider != "torch_compile":
        return lambda problem: providers.provide(provider, problem, mode)
    from .providers.torch_dense import dense_log_probs, dense_loss

    loss = torch.compile(dense_log_probs if mode.reduction == "log_probs" else dense_loss)
    return lambda problem: step_of(loss, problem, mode)


def first_tokens(problem: Problem, tokens: int) -> Problem:
    shape = problem.shape._replace(N=tokens)
    vectors = {name: getattr(problem, name)[:tokens] for name in ("target", "cotangent")}
    return replace(problem, shape=shape, input=problem.input.detach()[:tokens], **vectors)


def compiled() -> int:
    return sum(1 for _ in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def cell(rows: list[Row]) -> str:
    """Seconds, and the number of kernels compiled meanwhile."""
    timed = [row for row in rows if row.seconds is not None]
    if not timed:
        return rows[0].reason[:24] if rows else ""
    return f"{sum(row.seconds for row in timed):.2f} s, {sum(row.compilations for row in timed)}"


def table(rows: list[Row], function: str) -> str:
    """The table of a function: a line for each step, a column for each provider."""
    names = list(dict.fromkeys(row.provider for row in rows))
    cells: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row.function == function:
            cells.setdefault((row.story, row.step), {}).setdefault(row.provider, []).append(row)
    lines = [f"{function + ': seconds, compilations':32}" + "".join(f"{name:>26}" for name in names)]
    for (story, step), found in cells.items():
        lines.append(f"{story:8}{step:24}" + "".join(f"{cell(found.get(name, [])):>26}" for name in names))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
