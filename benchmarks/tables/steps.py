"""Tables of a training step by provider and shape, fwd_bwd.csv, and of users' loads, loads.csv."""

from __future__ import annotations

from collections.abc import Sequence

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
    """(NxDxV, provider) -> the row, where it has a time."""
    return {(shape_of(row), row["provider"]): row for row in rows if row["mode"] == "fwd_bwd" and row["ms"]}


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
        body.append(
            (
                names[provider],
                *(span([float(row[column]) for row in measured], error) for column in ("err_dx", "err_dw")),
            )
        )
    return markdown(["relative error, bf16", "dX", "dW"], body)


LOADS_OF_README = (
    "8192x4096x128256, operands of a trained model",
    *(shape for pair in loads.ODD for shape in pair),
    *(f"8192x4096x128256, {share} ignored" for share in ("50%", "75%", "90%", "99%")),
    *("1024x4096x151936", "1024x2048x128256", "256x4096x128256", "256x4096x151936", "128x4096x151936"),
    *("256x2048x128256", "2048x512x32000"),
)


def milliseconds_of_some(rows: Rows) -> str:
    heading, line, *body = loads.milliseconds(loads.Times(rows))
    return "\n".join((heading, line, *(row for row in body if row.split(" | ")[0][2:] in LOADS_OF_README)))


TABLES = {
    "fwd_bwd: times": lambda: times(rows_of("fwd_bwd")),
    "fwd_bwd: errors": lambda: errors(rows_of("fwd_bwd")),
    "fwd_bwd: errors everywhere": lambda: errors_everywhere(rows_of("fwd_bwd")),
    "loads: some": lambda: milliseconds_of_some(rows_of("loads")),
    "loads: milliseconds": lambda: "\n".join(loads.milliseconds(loads.Times(rows_of("loads")))),
    "loads: host": lambda: "\n".join(loads.hosts(loads.Times(rows_of("loads")))),
    "loads: marks": lambda: "\n".join(loads.marks(loads.Times(rows_of("loads")))),
}
