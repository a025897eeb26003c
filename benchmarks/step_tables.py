"""`python -m benchmarks.step_tables`: the tables of README.md and docs/ that are fwd_bwd.csv's and loads.csv's.

Each stands between <!-- CSV: NAME --> and <!-- end of NAME -->; what is between is written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from . import loads
from .document_tables import Rows, markdown, put_between, rows_of_csv
from .report import REPOSITORY
from .shapes import GROUPS

RESULTS = REPOSITORY / "benchmarks" / "results" / "nvidia-h200"
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
    """(NxDxV, provider) -> the row, where it has a time."""
    return {(shape_of(row), row["provider"]): row for row in rows if row["mode"] == "fwd_bwd" and row["ms"]}


def shape_of(row: dict[str, str]) -> str:
    return f"{row['N']}x{row['D']}x{row['V']}"


def named(rows: Rows) -> dict[str, str]:
    """Provider -> its name with the library's version."""
    versions = {row["provider"]: row["version"] for row in rows if row["version"]}
    return {provider: name.format(versions.get(provider, "")) for provider, name in NAMES.items()}


def times(rows: Rows) -> str:
    """Over the three GEMMs, and MiB beyond the gradients."""
    timed = found(rows)
    floors = (f"{float(timed[shape, 'floor']['ms']):.1f} ms" for shape in SHAPES)
    body = [("three bare cuBLAS GEMMs", *floors)]
    for provider, name in named(rows).items():
        body.append((name, *(time_and_memory(timed.get((shape, provider))) for shape in SHAPES)))
    return markdown(["forward + backward, bf16", *SHAPES], body)


def time_and_memory(row: dict[str, str] | None) -> str:
    return f"{float(row['x_floor']):.2f}x, {float(row['beyond_gradients_MiB']):,.0f} MiB" if row else "failed"


def errors(rows: Rows) -> str:
    """Relative to float64, over the key shapes."""
    return errors_of(rows, list(NAMES), SHAPES)


def errors_everywhere(rows: Rows) -> str:
    return errors_of(rows, ["ours", "ours_64MiB", "torch_compile"], [shape for shape, _ in found(rows)])


def errors_of(rows: Rows, providers: Sequence[str], shapes: Sequence[str]) -> str:
    timed, names, body = found(rows), named(rows), []
    for provider in providers:
        measured = [timed[shape, provider] for shape in dict.fromkeys(shapes) if (shape, provider) in timed]
        body.append((names[provider], *(spread(measured, column) for column in ("err_dx", "err_dw"))))
    return markdown(["relative error, bf16", "dX", "dW"], body)


def spread(rows: Rows, column: str) -> str:
    ends = (f"{end(float(row[column]) for row in rows):.1e}".replace("e-0", "e-") for end in (min, max))
    return " to ".join(dict.fromkeys(ends))


LOADS_OF_README = (
    *(shape for pair in loads.ODD for shape in pair),
    *(f"8192x4096x128256, {share} ignored" for share in ("50%", "75%", "90%", "99%")),
    *("1024x4096x151936", "1024x2048x128256", "256x4096x128256", "256x4096x151936", "128x4096x151936"),
    *("256x2048x128256", "2048x512x32000"),
)


def milliseconds_of_some(rows: Rows) -> str:
    heading, line, *body = loads.milliseconds(loads.Times(rows))
    return "\n".join((heading, line, *(row for row in body if row.split(" | ")[0][2:] in LOADS_OF_README)))


TABLES: dict[str, dict[str, Callable[[Rows], str]]] = {
    "fwd_bwd": {"times": times, "errors": errors, "errors everywhere": errors_everywhere},
    "loads": {
        "some": milliseconds_of_some,
        "milliseconds": lambda rows: "\n".join(loads.milliseconds(loads.Times(rows))),
        "marks": lambda rows: "\n".join(loads.marks(loads.Times(rows))),
    },
}
DOCUMENTS = {  # and their tables
    "README.md": (("fwd_bwd", "times"), ("fwd_bwd", "errors"), ("loads", "some")),
    "docs/numerics.md": (("fwd_bwd", "errors everywhere"),),
    "docs/performance.md": (("loads", "marks"), ("loads", "milliseconds")),
}


def written(document: str, text: str) -> str:
    """The document with its tables made of the CSVs."""
    for csv, name in DOCUMENTS[document]:
        table = TABLES[csv][name](rows_of_csv(RESULTS / f"{csv}.csv"))
        text = put_between(text, f"<!-- {csv}: {name} -->", f"<!-- end of {name} -->", table)
    return text


def main() -> None:
    for document in DOCUMENTS:
        path = REPOSITORY / document
        path.write_text(written(document, path.read_text()))


if __name__ == "__main__":
    main()
