"""The table of log-probabilities against a float32 head, from float32_head.csv of the first of DEVICES that has one."""

from __future__ import annotations

from .markdown import Rows, error, markdown, rows_of

DEVICES = ("nvidia-h200", "nvidia-h100")
HEADS = (("error", "ours"), ("error", "float32"), ("error", "mixed"), ("error", "rounded"), ("apart", "float32"))
HEADINGS = ("`linear_log_probs`", "float32 copies", "float32 result", "rounded logits", "apart from float32 copies")


def table() -> str:
    rows = next(rows for rows in (rows_of("float32_head", device) for device in DEVICES) if rows)
    rows = [row for row in rows if row["number"] == "log_probs"]
    body = []
    for where in dict.fromkeys((row["dtype"], row["N"], row["D"], row["V"]) for row in rows):
        dtype, *shape = where
        of_shape = [row for row in rows if (row["dtype"], row["N"], row["D"], row["V"]) == where]
        body.append((f"{dtype}, {'x'.join(shape)}", *(number(of_shape, *column) for column in HEADS)))
    first = rows[0]
    said = f"{first['gpu']}, torch {first['torch']}, commit {first['commit']}:"
    return f"{said}\n\n{markdown(['', *HEADINGS], body)}"


def number(rows: Rows, column: str, head: str) -> str:
    return next((error(row[column]) for row in rows if row["head"] == head and row[column]), "")


TABLES = {"float32 head": table}
