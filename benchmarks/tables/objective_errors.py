"""The table of every objective's error, from each device's objective_errors.csv."""

from __future__ import annotations

from .markdown import Rows, error, markdown, rows_of

NAMES = {"nvidia-h200": "One H200", "amd-epyc": "A CPU"}
DTYPES = ("bfloat16", "float16", "float32")


def tables() -> str:
    """The tables of all devices, one GPU's first."""
    by_name = {name: rows_of("objective_errors", device) for device, name in NAMES.items()}
    return "\n\n".join(f"{name}, {where(rows)}:\n\n{table(rows)}" for name, rows in by_name.items() if rows)


def where(rows: Rows) -> str:
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    ranks = max(int(row["ranks"]) for row in rows)
    sharded = f", sharded over {ranks}" * (ranks > 1)
    return "{N}x{D}x{V}, torch {torch}{sharded}, commit {commits}".format(**rows[0], sharded=sharded, commits=commits)


def table(rows: Rows) -> str:
    """The largest error over the paths of a dtype: of gradients, and for metrics of the value."""
    body = []
    names = {row["objective"] for row in rows}
    for name in sorted(names, key=lambda name: (name.startswith("`"), name)):  # metrics last
        cells = []
        for dtype in DTYPES:
            of_dtype = [row for row in rows if (row["objective"], row["dtype"]) == (name, dtype)]
            columns = ("dx", "dw") if of_dtype and of_dtype[0]["err_dx"] else ("value",)
            cells += [largest(of_dtype, "err", columns), largest(of_dtype, "torch", columns)]
        body.append((name, *cells))
    return markdown(["", *(heading for dtype in DTYPES for heading in (dtype, "plain torch"))], body)


def largest(rows: Rows, whose: str, columns: tuple[str, ...]) -> str:
    if not rows:
        return ""
    return error(max(float(row[f"{whose}_{column}"]) for row in rows for column in columns))


TABLES = {"objective errors": tables}
