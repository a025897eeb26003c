"""Runs many cases, groups the failures by likely cause, and reduces the first of each group."""

import faulthandler
import math
import re
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from statistics import median
from threading import Timer

import torch

import flce_ops
from tests.fuzz.cases import Case
from tests.fuzz.consistent import simpler
from tests.fuzz.draw import draw
from tests.fuzz.judge import Failure, Verdict, examine

SHOWN_PER_GROUP = 5
REDUCED_PER_GROUP = 1
SECONDS_TO_REDUCE = 5.0  # in seconds of one core
SECONDS_TO_END = 30.0  # of a case that began in time, before its worker says where it is

Group = tuple[str, ...]


@dataclass(frozen=True)
class Result:
    index: int
    case: Case
    verdict: Verdict
    seconds: float  # in seconds of one core


def prepare(device: str) -> None:
    """What every process does before its first case."""
    torch.set_num_threads(1)  # the cases are too small for several threads
    if device == "interpreter":
        from tests.fuzz import triton_on_cpu

        triton_on_cpu.install()


def results(seed: int, indices: range, device: str, until: float) -> Iterator[Result]:
    """Runs the cases that begin before `until`, in seconds of time.time()."""
    for index in indices:
        if time.time() > until:
            return
        case = draw(seed, index, device)
        began = time.process_time()
        try:
            verdict = examine(case, device)
        except torch.AcceleratorError as error:
            verdict = Verdict([Failure("raises", f"the device is lost: {str(error).splitlines()[0]}")])
            yield Result(index, case, verdict, time.process_time() - began)
            return
        except Exception:
            verdict = Verdict([Failure("oracle", traceback.format_exc(limit=-1).splitlines()[-1][:160])])
        yield Result(index, case, verdict, time.process_time() - began)


def part(seed: int, indices: range, device: str, until: float) -> list[Result]:
    """The share of one worker."""
    prepare(device)
    found: list[Result] = []
    watch = Timer(until - time.time() + SECONDS_TO_END, tell_where_it_is, [seed, indices, found])
    watch.daemon = True
    if until < math.inf:
        watch.start()
    for result in shown_as_they_come(results(seed, indices, device, until), seed):
        found.append(result)
    watch.cancel()
    return found


def tell_where_it_is(seed: int, indices: range, found: list[Result]) -> None:
    print(f"--only {seed}:{indices[len(found)]}  has not ended", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()


def campaign(seed: int, indices: range, device: str, workers: int, seconds: float) -> int:
    """Divides the cases among `workers` processes in turn; on CUDA, by whole families of kernels (draw.py)."""
    began = time.perf_counter()
    until = time.time() + seconds
    if workers == 1:
        found = list(shown_as_they_come(results(seed, indices, device, until), seed))
    else:
        shares = [indices[k::workers] for k in range(workers)]
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            found = list(chain(*pool.map(part, [seed] * workers, shares, [device] * workers, [until] * workers)))
    lines = summary(seed, device, found, len(indices), time.perf_counter() - began)
    groups: dict[Group, list[Result]] = defaultdict(list)
    for result in sorted(found, key=lambda result: result.index):
        if result.verdict.failures:
            groups[group_of(result.case, result.verdict.failures[0])].append(result)
    for group, failed in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines += ["", f"## {len(failed)} x {' / '.join(group)}", ""]
        for k, result in enumerate(failed[:SHOWN_PER_GROUP]):
            again = f"python -m tests.fuzz --device {device} --only {seed}:{result.index}"
            lines.append(f"- `{again}`: {told(result.verdict.failures)}")
            if k < REDUCED_PER_GROUP and device != "cuda":  # on CUDA every step would compile kernels
                reduced, left = reduce(result.case, result.verdict, device)
                lines.append(f"  reduced: `{reduced}`: {told(left.failures)}")
    print("\n".join(lines), end="\n\n")
    return 1 if groups else 0


def shown_as_they_come(found: Iterator[Result], seed: int) -> Iterator[Result]:
    """Prints the first failure of every group at once."""
    seen = set()
    for result in found:
        if result.verdict.failures:
            group = group_of(result.case, result.verdict.failures[0])
            if group not in seen:
                print(f"--only {seed}:{result.index}  {' / '.join(group)}", flush=True)
            seen.add(group)
        yield result


def group_of(case: Case, failure: Failure) -> Group:
    """The function, how derivatives were taken, and what failed how. Each message of an exception is its own group."""
    family = case.function if case.function in ("log_probs", "kl_div") else "linear_cross_entropy"
    if failure.what in ("raises", "oracle"):
        return (family, case.mode, failure.what, re.sub(r"\d+", "N", failure.how))
    own_mode = case.mode in ("create_graph", "create_graph_once", "func_twice", "hvp", "batched", "vmap")
    return (
        family,
        case.mode if own_mode else "first derivatives",
        failure.what.split(" of ")[0],
        "error" if failure.how.startswith("error") else failure.how,
        "half" if case.autocast or case.dtype in ("float16", "bfloat16") else case.dtype,
        *(["learnt"] if case.learnt else []),
        *(["zero normalizer"] if case.normalizer == "zero" else []),
        *(["dependent"] if case.relations else []),
        *(["poison"] if case.poison else []),
    )


def reduce(case: Case, verdict: Verdict, device: str) -> tuple[Case, Verdict]:
    """The simplest case that fails in the same result, in the same way."""
    wanted = kind(verdict)
    began, progress = time.process_time(), True
    while progress:
        progress = False
        for candidate in simpler(case):
            if time.process_time() - began > SECONDS_TO_REDUCE:
                return case, verdict
            try:
                found = examine(candidate, device)
            except Exception:  # such a case does not exist
                continue
            if kind(found) == wanted:
                case, verdict, progress = candidate, found, True
                break
    return case, verdict


def kind(verdict: Verdict) -> tuple[str, str] | None:
    if not verdict.failures:
        return None
    first = verdict.failures[0]
    return first.what.split(" of ")[0], first.how[:30].split(" ")[0]


def told(failures: list[Failure]) -> str:
    return "; ".join(
        f"{f.what}: {f.how}" + ("" if f.ratio == float("inf") else f", {f.ratio:.1f} x allowed") for f in failures
    )


def summary(seed: int, device: str, found: list[Result], planned: int, wall: float) -> list[str]:
    name = torch.cuda.get_device_name() if device == "cuda" else device
    modes = Counter(result.case.mode for result in found)
    seconds = sorted(result.seconds for result in found)
    lines = [
        f"# {len(found)} cases of seed {seed} on {name}",
        "",
        f"flce_ops {flce_ops.__version__}, torch {torch.__version__}: {wall:.0f} s, {sum(seconds):.0f} s of a core, "
        f"{len(found) / sum(seconds):.0f} cases a second and core; median {1e3 * median(seconds):.1f} ms, "
        f"longest {seconds[-1]:.1f} s.",
        f"Failed {sum(bool(result.verdict.failures) for result in found)}, "
        f"refused by name as documented {sum(result.verdict.refused for result in found)}, "
        f"judged by their neighbours {sum(result.verdict.second_line for result in found)}.",
        f"Modes: {', '.join(f'{mode} {count}' for mode, count in sorted(modes.items()))}.",
    ]
    if len(found) < planned:
        lines.append(f"**{planned - len(found)} cases did not run**: the time was up, or a worker lost its device.")
    return lines


def show(seed: int, index: int, device: str) -> int:
    case = draw(seed, index, device)
    print(case)
    verdict = examine(case, device)
    print("refused by name" if verdict.refused else told(verdict.failures) or "as near as plain torch")
    if verdict.failures:
        reduced, left = reduce(case, verdict, device)
        print(f"reduced: {reduced}\n{told(left.failures)}")
    return 1 if verdict.failures else 0
