"""The table of cross-entropy of given logits, from cross_entropy.csv."""

from __future__ import annotations

from .markdown import Rows, markdown, rows_of

NAMES = {
    "ours": "flce_ops",
    "ours_in_place": "in place",
    "torch_compile": "torch.compile",
    "liger": "Liger",
    "quack_in_place": "QuACK, in place",
}


def table(rows: Rows) -> str:
    """ms, share of a copy's bandwidth, and the host's us, with the shortest of a line in bold."""
    timed = {(shape_of(row), row["provider"]): row for row in rows if row["ms"]}
    names = {provider: name for provider, name in NAMES.items() if any(key[1] == provider for key in timed)}
    body = []
    for shape in dict.fromkeys(shape for shape, _ in timed):
        copy, shortest = timed[shape, "copy"], min(float(timed[shape, p]["ms"]) for p in names if (shape, p) in timed)
        cells = [figures(timed.get((shape, provider)), copy, shortest) for provider in names]
        body.append((shape, f"{float(copy['ms']):.2f}", *cells))
    return f"{where(rows)}\n\n{markdown(['', 'a copy', *names.values()], body)}"


def shape_of(row: dict[str, str]) -> str:
    return f"{row['N']}x{row['V']} {row['dtype'].replace('bfloat', 'bf').replace('float', 'fp')}"


def figures(row: dict[str, str] | None, copy: dict[str, str], shortest: float) -> str:
    if row is None:
        return ""
    mark = "**" if float(row["ms"]) == shortest else ""
    host = f", {float(row['host_us']):.0f}" if row.get("host_us") else ""
    return f"{mark}{float(row['ms']):.2f}{mark}, {float(row['GBps']) / float(copy['GBps']):.0%}{host}"


def where(rows: Rows) -> str:
    versions = {NAMES[row["provider"]]: row["version"] for row in rows if NAMES.get(row["provider"]) and row["ms"]}
    versions = {name.removesuffix(", in place"): version for name, version in versions.items() if name != "in place"}
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "flce_ops")
    return f"Commit {rows[0]['commit']}, torch {rows[0]['torch']}; {text}."


TABLES = {"cross_entropy.csv": lambda: table(rows_of("cross_entropy"))}
