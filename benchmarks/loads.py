"""Loads of users, and the times a step should reach on each: `python -m benchmarks --loads`, one run, one CSV, its
tables.

`python -m benchmarks.loads CSV` prints the tables again.

A load is a shape, the share of ignored tokens, the order of the prior, and the providers. A mark is a ratio of two
times of the same run, never of two runs, because a card's clock differs by 5 % between runs.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from .data import IGNORED, PRIORS, TRAINED
from .shapes import Shape, parse_shapes

PEERS = "torch_compile,liger,cce,quack_chunked"
HOPPER_PEERS = "liger_cutedsl,liger_cutile"
EVERY_OURS = "ours,ours_compiled,ours_captured"
HOST_SHAPES = ("2048x512x32000", "256x4096x128256")  # shapes whose steps are limited by the host
HOSTS = ("ours", "ours_compiled", "torch_compile", "quack_chunked", "liger", "cce")


class Load(NamedTuple):
    shapes: str  # names of groups in shapes.py, and NxDxV
    providers: str
    ignored: float = IGNORED
    prior: str = PRIORS[0]


ODD = (  # a size that no multiple of 8 or 16 divides, and the next one that is such a multiple
    ("12288x1536x50257", "12288x1536x50304"),
    ("20000x1024x32001", "20000x1024x32064"),
    ("4096x4096x151669", "4096x4096x151680"),
    ("8192x2052x32000", "8192x2064x32000"),
)
LOADS = (  # the most important first, because the budget may end a run. Three minutes on an H200, mostly compilation
    Load("8192x4096x128256", f"floor,ours,{PEERS},{HOPPER_PEERS}"),
    *(Load("8192x4096x128256", "ours,ours_compacted", share) for share in (0.99, 0.9, 0.75, 0.5)),
    Load("8192x4096x128256", "floor,ours", 0.0),
    Load("2048x512x32000,256x4096x128256", f"floor,{EVERY_OURS},{PEERS}"),
    Load("1024x4096x151936,1024x2048x128256", f"floor,{EVERY_OURS},torch_compile"),
    *(Load(f"{odd},{even}", "ours,torch_compile") for odd, even in ODD),
    Load("8192x2304x256000,16384x896x151936,8192x512x128256,16384x2048x128256", "floor,ours,torch_compile"),
    Load("8192x5120x151936,4096x8192x128256", "floor,ours"),
    Load("8192x4096x128256", "floor,ours", prior="ordered"),
    Load("small", f"floor,{EVERY_OURS},torch_compile"),
)


class Unit(NamedTuple):
    """Timed together: one mode at one shape, with all providers."""

    mode: str
    shape: Shape
    ignored: float
    prior: str
    providers: str  # in the notation of providers.choose


def units(trained: Shape | None = None) -> list[Unit]:
    """The units of LOADS, each once. A trained model's operands come first, if a file holds them, with this shape."""
    found: dict[tuple, Unit] = {}
    if trained:
        found[trained, IGNORED, TRAINED] = Unit("fwd_bwd", trained, IGNORED, TRAINED, f"floor,ours,{PEERS}")
    for load in LOADS:
        for shape in parse_shapes(load.shapes):
            unit = Unit("fwd_bwd", shape, load.ignored, load.prior, load.providers)
            found.setdefault((shape, load.ignored, load.prior), unit)
    return list(found.values())


# ---------------------------------------------------------------- marks


Key = tuple[str, float, str]  # NxDxV, share of ignored tokens, prior


class Times:
    """The rows of a run, by load and provider."""

    def __init__(self, rows: Iterable[dict[str, str]]) -> None:
        self.rows = {
            (f"{row['N']}x{row['D']}x{row['V']}", float(row["ignored"]), row["prior"], row["provider"]): row
            for row in rows
            if row["mode"] == "fwd_bwd" and row["ms"]
        }

    def number(self, column: str, shape: str, provider="ours", ignored=IGNORED, prior=PRIORS[0]) -> float:
        """Raises KeyError if it was not measured."""
        text = self.rows[shape, ignored, prior, provider][column]
        if not text:
            raise KeyError(column)
        return float(text)

    def ratio(self, one: tuple[str, str], other: tuple[str, str], **data) -> float:
        return self.number("ms", *one, **data) / self.number("ms", *other, **data)


class Mark(NamedTuple):
    name: str
    must: float
    goal: float
    figure: Callable[[Times], float]
    form: str = ".3f"


def beside(shape: str, padded: str) -> Mark:
    return Mark(f"{shape} over {padded}", 1.05, 1.01, lambda times: times.ratio((shape, "ours"), (padded, "ours")))


def masked(share: float) -> Mark:
    shape = "8192x4096x128256"
    return Mark(
        f"{shape}, {share:.0%} ignored, over rows compacted by hand",
        1.15,
        1.05,
        lambda times: times.ratio((shape, "ours"), (shape, "ours_compacted"), ignored=share),
    )


def over_the_floor(shape: str, must: float, goal: float, provider: str = "ours", **data) -> Mark:
    how = provider.removeprefix("ours").replace("_", ", ") + "".join(f", {name} {data[name]}" for name in data)
    return Mark(
        f"{shape}{how}, over the floor", must, goal, lambda times: times.number("x_floor", shape, provider, **data)
    )


def host(shape: str, provider: str) -> Mark:
    name = f"{shape}, launch to return in ms, {'compiled' if provider == 'ours_compiled' else 'eager'}"
    return Mark(name, 0.6, 0.3, lambda times: times.number("host_us", shape, provider) / 1e3, ".2f")


def error_of_dw(times: Times) -> float:
    errors = [float(row["err_dw"]) for (*_, provider), row in times.rows.items() if provider == "ours"]
    if not errors:
        raise KeyError("ours")
    return max(errors)


MARKS = (
    *(beside(odd, even) for odd, even in ODD),
    *map(masked, (0.5, 0.75, 0.9, 0.99)),
    over_the_floor("8192x4096x128256", 1.05, 1.02, ignored=0.0),
    *(host(shape, how) for shape in HOST_SHAPES for how in ("ours", "ours_compiled")),
    *(over_the_floor("2048x512x32000", 2.4, 1.6, how) for how in EVERY_OURS.split(",")),
    *(over_the_floor("256x4096x128256", 1.15, 1.08, how) for how in EVERY_OURS.split(",")),
    over_the_floor("1024x4096x151936", 1.07, 1.04),
    over_the_floor("1024x2048x128256", 1.12, 1.06),
    over_the_floor("8192x2304x256000", 1.08, 1.04),
    over_the_floor("16384x896x151936", 1.08, 1.05),
    over_the_floor("8192x512x128256", 1.20, 1.12),
    *(over_the_floor(shape, 1.05, 1.02) for shape in ("8192x4096x128256", "8192x5120x151936", "4096x8192x128256")),
    over_the_floor("8192x4096x128256", 1.05, 1.02, prior="ordered"),
    Mark("error of dW, the largest", 2.6e-3, 2.6e-3, error_of_dw, ".1e"),
)


NAMES = {
    **{"ours": "flce_ops", "ours_compiled": "compiled", "ours_compacted": "rows compacted by hand"},
    **{"torch_compile": "torch.compile", "cce": "CCE", "liger": "Liger", "quack_chunked": "QuACK"},
    "liger_cutedsl": "Liger CuTe",
}


def fastest_peer(times: Times, load: Key) -> tuple[str, float]:
    """The fastest provider other than flce_ops, and its ms. Rows compacted by hand count as a peer; the bare GEMMs do
    if there is no other.
    """
    found = {key[3]: float(row["ms"]) for key, row in times.rows.items() if key[:3] == load}
    peers = {name: ms for name, ms in found.items() if name not in ("floor", *EVERY_OURS.split(","))}
    return min((peers or found).items(), key=lambda pair: pair[1])


def marks(times: Times) -> list[str]:
    """A Markdown table of the marks and their measurements."""
    found = ["| mark | must | goal | measured |", "|---|---|---|---|"]
    for mark in MARKS:
        try:
            figure = mark.figure(times)
            measured = f"{figure:{mark.form}}" + (" **missed**" if figure > mark.must else "")
        except KeyError:
            measured = "not measured"
        found.append(f"| {mark.name} | {mark.must:g} | {mark.goal:g} | {measured} |")
    return found


def milliseconds(times: Times) -> list[str]:
    """A Markdown table of the loads, in bold if another provider is faster than this package's eager step."""
    found = ["| load, ms | flce_ops | compiled | CUDA graph | best otherwise |", "|---|---|---|---|---|"]
    for load in dict.fromkeys(key[:3] for key in times.rows):
        ours = [times.rows.get((*load, name)) for name in EVERY_OURS.split(",")]
        cells = [f"{float(row['ms']):.2f}" if row else "" for row in ours]
        who, ms = fastest_peer(times, load)
        peer = f"{NAMES.get(who, who)} {ms:.2f}"
        peer = f"**{peer}**" if ours[0] and ms < float(ours[0]["ms"]) else peer
        found.append(f"| {name_of(load)} | {' | '.join(cells)} | {peer} |")
    return found


def name_of(load: Key) -> str:
    shape, ignored, prior = load
    share = "" if ignored == IGNORED else f", {ignored:.0%} ignored"
    return shape + share + {PRIORS[0]: "", TRAINED: ", operands of a trained model"}.get(prior, f", {prior} prior")


def hosts(times: Times) -> list[str]:
    """A Markdown table of the host's part of a step, and of the time to wake autograd's thread."""
    found = [f"| launch to return, ms | {' | '.join(NAMES[name] for name in HOSTS)} |", "|---|" + "---|" * len(HOSTS)]
    for shape in HOST_SHAPES:
        for where, column in (("", "host_us"), (", autograd in this thread", "host_one_thread_us")):
            rows = [times.rows.get((shape, IGNORED, PRIORS[0], name), {}) for name in HOSTS]
            cells = [f"{float(row[column]) / 1e3:.2f}" if row.get(column) else "" for row in rows]
            if any(cells):
                found.append(f"| {shape}{where} | {' | '.join(cells)} |")
    return found


def tables(rows: Iterable[dict[str, str]]) -> list[str]:
    times = Times(rows)
    return [*marks(times), "", *milliseconds(times), "", *hosts(times)]


if __name__ == "__main__":
    with Path(sys.argv[1]).open(newline="") as file:
        print(*tables(csv.DictReader(file)), sep="\n")
