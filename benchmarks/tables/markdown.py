"""Reads rows of the committed CSVs, and writes Markdown tables."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from ..report import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
Rows = Sequence[dict[str, str]]


def rows_of(name: str | Path, device: str = "nvidia-h200") -> list[dict[str, str]]:
    """The rows of a committed CSV, by its name or path. Empty if there is no such file."""
    path = name if isinstance(name, Path) else RESULTS / device / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shape_of(row: dict[str, str]) -> str:
    return f"{row['N']}x{row['D']}x{row['V']}"


def error(value: float | str) -> str:
    """Such as 1.7e-3."""
    return f"{float(value):.1e}".replace("e-0", "e-")


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The smallest and the largest value. One value if both read the same; an empty text for no values."""
    return " to ".join(dict.fromkeys(form(end(values)) for end in (min, max))) if values else ""


def measured_at(rows: Rows, names: dict[str, str]) -> str:
    """The versions of torch and of the providers that `names` has."""
    versions = {
        names[row["provider"]]: row["version"] for row in rows if row.get("version") and row["provider"] in names
    }
    return "With " + ", ".join([f"torch {rows[0]['torch']}", *map(" ".join, versions.items())]) + "."


def markdown(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
