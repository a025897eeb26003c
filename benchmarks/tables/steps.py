"""Tables of a training step by provider and shape, from fwd_bwd.csv, and of users' loads, from loads.csv."""

from __future__ import annotations

from .. import loads
from ..shapes import GROUPS
from .markdown import Rows, error, markdown, rows_of, shape_of, span

NAMES = {
    "ours": "**flce_ops**",
    "ours_2GiB": "flce_ops, workspace 2 GiB",
    "ours_128MiB": "flce_ops, workspace 128 MiB",
    "ours_64MiB": "flce_ops, workspace 64 MiB",
    "torch_compile": "torch.compile of the plain pair",
    "torch_eager": "the plain pair, eager",
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
    return {provider: name.format(versions.get(provider, "")) for provider, name in NAMES.items()}


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
        measured = [timed[shape, provider] for shape in SHAPES if (shape, provider) in timed]
        spans = (span([float(row[column]) for row in measured], error) for column in ("err_dx", "err_dw"))
        body.append((name, *spans))
    return markdown(["relative error, bf16", "dX", "dW"], body)


CARDS = {"nvidia-h200": "H200", "nvidia-h100": "H100"}
NO_PEER = ("floor", *loads.EVERY_OURS.split(","))


def by_card() -> str:
    """One line for each load: this package's ms, its ms replayed from a CUDA graph, and the fastest other's, in bold if
    that is faster.
    """
    times = {card: loads.Times(rows_of("loads", folder)) for folder, card in CARDS.items()}
    body = []
    for load in dict.fromkeys(key[:3] for key in times["H200"].rows):
        cells = [cell for card in times.values() for cell in (ms_of(card, load, "ours"), fastest_other(card, load))]
        cells.insert(1, ms_of(times["H200"], load, "ours_captured"))
        body.append((loads.name_of(load), *cells))
    return markdown(["ms", "H200", "in a CUDA graph", "best other", "H100", "best other"], body)


def ms_of(times: loads.Times, load: loads.Key, provider: str) -> str:
    row = times.rows.get((*load, provider))
    return f"{float(row['ms']):.2f}" if row else ""


def fastest_other(times: loads.Times, load: loads.Key) -> str:
    others = {key[3]: float(row["ms"]) for key, row in times.rows.items() if key[:3] == load and key[3] not in NO_PEER}
    if not others:
        return ""
    best = min(others, key=others.__getitem__)
    text = f"{loads.NAMES[best]} {others[best]:.2f}"
    return f"**{text}**" if others[best] < float(times.rows[(*load, "ours")]["ms"]) else text


TABLES = {
    "fwd_bwd: times": lambda: times(rows_of("fwd_bwd")),
    "fwd_bwd: errors": lambda: errors(rows_of("fwd_bwd")),
    "loads: by card": by_card,
    "loads: host": lambda: "\n".join(loads.hosts(loads.Times(rows_of("loads")))),
}
