"""`python -m benchmarks.tables`: writes every table of README.md and docs/ that comes from a CSV anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..report import REPOSITORY
from . import clients, front, objectives, steps, training

TABLES: dict[str, Callable[[], str]] = {
    name: table for file in (front, steps, objectives, clients, training) for name, table in file.TABLES.items()
}


def documents() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def written(text: str) -> str:
    """A document with its tables made from the CSVs."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{table()}\n\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for path in documents():
        path.write_text(written(path.read_text()))
