"""Rows of the committed CSVs, and tables of Markdown."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from ..report import REPOSITORY

H200 = REPOSITORY / "benchmarks" / "results" / "nvidia-h200"
Rows = Sequence[dict[str, str]]


def rows_of(name: str) -> list[dict[str, str]]:
    """Of a CSV of the H200, by its name."""
    with (H200 / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
