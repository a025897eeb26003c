"""Tables of a training step by provider and shape, from fwd_bwd.csv, and of users' loads, from loads.csv."""

from __future__ import annotations

from .. import loads
from ..shapes import GROUPS
from .markdown import Rows, error, markdown, rows_of, shape_of, span

NAMES = {
    "ours": "**flce_ops**",
    "ours_2GiB": "flce_ops, workspace 2 GiB",
    "torch_compile": "torch.compile of the plain pair",
    "torch_eager": "the plain pair, eager",
    "torch_chunked": "torch {}, chunked",
    "quack_chunked": "QuACK {} chunked",
    "quack_scaled_exp": "QuACK {} scaled-exp",
    "liger": "Liger {}",
    "cce": "Apple CCE {}",
}
SHAPES = tuple(map(str, GROUPS["key"]))


def found(rows: Rows) -> dict[tuple[str, str], dict[str, str]]:
    """(NxDxV, provider) -> the row, if it has a time."""
    return {(shape_of(row), row["provider"]): row for row in rows if row["mode"] == "fwd_bwd" and row["ms"]}


def named(rows: Rows) -> dict[str, str]:
    """Provider -> its name with the library's version."""
    versions = {row["provider"]: row["version"] for row in rows if row["version"]}
    return {provider: name.format(versions[provider]) for provider, name in NAMES.items() if provider in versions}


def times(rows: Rows) -> str:
    """The time relative to the three GEMMs, and MiB beyond the gradients."""
    timed = found(rows)
    floors = (f"{float(timed[shape, 'floor']['ms']):.1f} ms" for shape in SHAPES)
    body = [("three bare cuBLAS GEMMs", *floors)]
    for provider, name in named(rows).items():
        body.append((name, *(time_and_memory(timed.get((shape, provider))) for shape in SHAPES)))
    return markdown(["forward + backward, bf16", *SHAPES], body)


def time_and_memory(row: dict[str, str] | None) -> str:
    return f"{float(row['x_floor']):.2f}x, {float(row['beyond_gradients_MiB']):,.0f} MiB" if row else "failed"


def errors(rows: Rows) -> str:
    """Errors relative to float64, over the key shapes."""
    timed, body = found(rows), []
    for provider, name in named(rows).items():
        if provider.startswith("ours_"):  # in another workspace
            continue
        measured = [timed[shape, provider] for shape in SHAPES if (shape, provider) in timed]
        spans = (span([float(row[column]) for row in measured], error) for column in ("err_dx", "err_dw"))
        body.append((name, *spans))
    return markdown(["relative error, bf16", "dX", "dW"], body)


# Loads whose neighbours in the table tell the same; they are in it if another library is faster.
LIKE_OTHERS = (
    *("1024x2048x128256", "2048x2048x128256", "2048x4096x151936", "256x4096x151936"),
    *("20000x1024x32001", "20000x1024x32064", "4096x4096x151680", "12288x1536x50304", "16384x768x50257"),
)


def of_users() -> str:
    """The ms of bare GEMMs, of this package, of its steps replayed from a CUDA graph, and of the fastest other, in bold
    if that is faster. Not of loads without another library, and of LIKE_OTHERS.
    """
    times = loads.Times(rows_of("loads"))
    body = []
    for load in times.loads:
        name, other = loads.name_of(load), times.fastest_other(load)
        if other and (name not in LIKE_OTHERS or "**" in other):
            body.append((name, *(times.ms(load, column) for column in ("floor", "ours", "ours_captured")), other))
    return markdown(["ms", "GEMMs", "flce_ops", "in a CUDA graph", "best other"], body)


TABLES = {
    "fwd_bwd: times": lambda: times(rows_of("fwd_bwd")),
    "fwd_bwd: errors": lambda: errors(rows_of("fwd_bwd")),
    "loads.csv": of_users,
}
