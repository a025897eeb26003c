"""Loads of users: `python -m benchmarks --loads`, one run, one CSV, its tables.

`python -m benchmarks.loads CSV` prints the tables again.

A load is a shape, the share of ignored tokens, the order of the prior, and the providers.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .data import IGNORED, PRIORS, TRAINED
from .shapes import Shape, parse_shapes

PEERS = "torch_compile,liger,cce,quack_chunked"
HOPPER_PEERS = "liger_cutedsl"
EVERY_OURS = "ours,ours_compiled,ours_captured"
HOST_SHAPES = ("2048x512x32000", "256x4096x128256")  # shapes whose steps are limited by the host
HOSTS = ("ours", "ours_compiled", "torch_compile", "quack_chunked", "liger", "cce")


WORKSPACES = "ours_128MiB,ours_256MiB"
CAPTURED = "ours,ours_captured"  # where a slow host may limit the step
SMALL = "2048x512x32000,1024x1024x50304,512x2048x32000"
FAST_PEERS = "torch_compile,quack_chunked"


class Load(NamedTuple):
    shapes: str  # names of groups in shapes.py, and NxDxV
    providers: str
    ignored: float = IGNORED
    prior: str = PRIORS[0]
    mode: str = "fwd_bwd"


# The most important first, because the budget may end a run. Six minutes on an H200, mostly compilation. If a load
# stands here twice, the first counts.
LOADS = (
    Load("8192x4096x128256", f"floor,ours,{WORKSPACES},{PEERS},{HOPPER_PEERS}"),
    Load("16384x896x151936", f"floor,ours,{WORKSPACES},{FAST_PEERS}"),
    Load("few_features", f"floor,{CAPTURED},{FAST_PEERS},{HOPPER_PEERS}"),
    Load("8192x2304x256000", f"floor,ours,{FAST_PEERS}"),
    Load("8192x2052x32000,8192x2064x32000", f"floor,{CAPTURED},{FAST_PEERS}"),
    Load(SMALL, f"floor,{EVERY_OURS},{FAST_PEERS}"),
    Load(SMALL, f"ours,{FAST_PEERS}", mode="new_n"),
    Load("8192x4096x128256", f"floor,ours,{FAST_PEERS}", mode="fwd"),
    Load("3000x7168x129280,16384x2048x128256", f"floor,ours,{FAST_PEERS}"),
    Load("65536x4096x128256", "floor,ours"),
    Load("262144x4096x128256", "ours"),
    *(Load("8192x4096x128256", f"{CAPTURED},ours_compacted", share) for share in (0.99, 0.9, 0.75, 0.5)),
    Load("8192x4096x128256", "floor,ours", 0.0),
    Load("256x4096x128256", f"floor,{EVERY_OURS},{PEERS}"),
    Load("1024x4096x151936,1024x2048x128256", f"floor,{EVERY_OURS},torch_compile"),
    Load("odd", "ours,torch_compile"),
    Load("8192x512x128256", "floor,ours,torch_compile"),
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
        found["fwd_bwd", trained, IGNORED, TRAINED] = Unit("fwd_bwd", trained, IGNORED, TRAINED, f"floor,ours,{PEERS}")
    for load in LOADS:
        for shape in parse_shapes(load.shapes):
            unit = Unit(load.mode, shape, load.ignored, load.prior, load.providers)
            found.setdefault(unit[:4], unit)
    return list(found.values())


# ---------------------------------------------------------------- tables


Key = tuple[str, float, str, str]  # NxDxV, share of ignored tokens, prior, mode
NAMES = {
    **{"ours": "flce_ops", "ours_compiled": "compiled", "ours_compacted": "rows compacted by hand"},
    **{"torch_compile": "torch.compile", "cce": "CCE", "liger": "Liger", "quack_chunked": "QuACK"},
    "liger_cutedsl": "Liger CuTe",
}
IN_TABLE = ("floor", *EVERY_OURS.split(","))
NO_PEER = (*IN_TABLE, *WORKSPACES.split(","))


class Times:
    """The rows of a run, by load and provider."""

    def __init__(self, rows: Iterable[dict[str, str]]) -> None:
        self.rows = {
            (
                f"{row['N']}x{row['D']}x{row['V']}",
                float(row["ignored"]),
                row["prior"],
                row["mode"],
                row["provider"],
            ): row
            for row in rows
            if row["ms"]
        }
        self.loads = list(dict.fromkeys(key[:4] for key in self.rows))

    def ms(self, load: Key, provider: str) -> str:
        row = self.rows.get((*load, provider))
        return f"{float(row['ms']):.2f}" if row else ""

    def fastest_other(self, load: Key) -> str:
        """In bold if it is faster than this package. Rows compacted by hand count, too."""
        others = {key[4]: float(row["ms"]) for key, row in self.rows.items() if key[:4] == load}
        ours = others.get("ours", 0.0)
        others = {name: ms for name, ms in others.items() if name not in NO_PEER}
        if not others:
            return ""
        best = min(others, key=others.__getitem__)
        mark = "**" * (others[best] < ours)
        return f"{mark}{NAMES.get(best, best)} {others[best]:.2f}{mark}"


def milliseconds(times: Times) -> list[str]:
    """A Markdown table of the loads."""
    found = ["| load, ms | GEMMs | flce_ops | compiled | CUDA graph | best other |", "|---|---|---|---|---|---|"]
    for load in times.loads:
        cells = [times.ms(load, name) for name in IN_TABLE]
        found.append(f"| {name_of(load)} | {' | '.join(cells)} | {times.fastest_other(load)} |")
    return found


def shape_of(row: dict[str, str]) -> str:
    return f"{row['N']}x{row['D']}x{row['V']}"


def name_of(load: Key) -> str:
    shape, ignored, prior, mode = load
    shape += {"fwd": ", forward alone", "new_n": ", another N each step"}.get(mode, "")
    share = "" if ignored == IGNORED else f", {ignored:.0%} ignored"
    return shape + share + {PRIORS[0]: "", TRAINED: ", operands of a trained model"}.get(prior, f", {prior} prior")


def hosts(times: Times) -> list[str]:
    """A Markdown table of the host's part of a step, and of the time to wake autograd's thread."""
    found = [f"| launch to return, ms | {' | '.join(NAMES[name] for name in HOSTS)} |", "|---|" + "---|" * len(HOSTS)]
    for shape in HOST_SHAPES:
        for where, column in (("", "host_us"), (", autograd in this thread", "host_one_thread_us")):
            rows = [times.rows.get((shape, IGNORED, PRIORS[0], "fwd_bwd", name), {}) for name in HOSTS]
            cells = [f"{float(row[column]) / 1e3:.2f}" if row.get(column) else "" for row in rows]
            if any(cells):
                found.append(f"| {shape}{where} | {' | '.join(cells)} |")
    return found


def tables(rows: Iterable[dict[str, str]]) -> list[str]:
    times = Times(rows)
    return [*milliseconds(times), "", *hosts(times)]


if __name__ == "__main__":
    with Path(sys.argv[1]).open(newline="") as file:
        print(*tables(csv.DictReader(file)), sep="\n")
