"""The table of whole training steps of clients, from clients.csv."""

from __future__ import annotations

from .markdown import Rows, error, markdown, rows_of

CLIENTS = {"trl": "TRL {}", "transformers": "Transformers, `model({}=...)`"}
HEADS = {
    "own": "its own",
    "flce_ops": "`patch`",
    "flce_ops_retaining": "`patch`, all saved",
    "liger_loss_alone": "Liger, its loss alone",
    "liger": "Liger, all of it",
    "liger_kernels_flce_ops_loss": "Liger's kernels, `patch`",
}


def table(rows: Rows) -> str:
    """One line for each head. The first line of a client names it."""
    body, before = [], ""
    for row in rows:
        client = client_of(row)
        body.append((client if client != before else "", HEADS[row["provider"]], *figures(row)))
        before = client
    return f"{where(rows)}\n\n{markdown(['client', 'head', 'step, ms', 'MiB', 'head, ms', 'MiB', 'errors'], body)}"


def client_of(row: dict[str, str]) -> str:
    name, in_float32 = CLIENTS[row["client"]].format(row["loss"]), row["weights"] == "float32"
    return f"{name}, float32 weights" if in_float32 else name


def figures(row: dict[str, str]) -> list[str]:
    """Figures of the step, of the head alone, and errors of the gradients of hidden states and weight."""
    if row["reason"]:
        return [row["reason"], "", "", "", ""]
    cells = [text for part in ("step", "head") for text in time_and_memory(row, part)]
    errors = ", ".join(error(row[column]) for column in ("err_dx", "err_dw"))
    return [*cells, errors]


def time_and_memory(row: dict[str, str], part: str) -> tuple[str, str]:
    return f"{float(row[f'{part}_ms']):.1f}", f"{float(row[f'{part}_peak_MiB']):,.0f}"


def where(rows: Rows) -> str:
    versions = {CLIENTS[row["client"]].split()[0].rstrip(","): row["version"] for row in rows}
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    libraries = "".join(f", {name} {version}" for name, version in versions.items())
    return f"{rows[0]['gpu']}, commit {commits}{libraries}."


TABLES = {
    "clients.csv": lambda: table(rows_of("clients")),
    "clients.csv, H100": lambda: table(rows_of("clients", "nvidia-h100")),
}
