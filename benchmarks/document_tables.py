"""Tables in the documents, made of a CSV: Markdown between two comments. Tests compare them with the CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

Rows = Sequence[dict[str, str]]


def rows_of_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(heading: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def put_between(text: str, begin: str, end: str, table: str) -> str:
    """The document with `table` where these comments stand around one; as it is where they do not."""
    pattern = f"{re.escape(begin)}\n.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{begin}\n\n{table}\n\n{end}", text, flags=re.DOTALL)
