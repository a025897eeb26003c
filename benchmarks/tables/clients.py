"""Tables of whole training steps of clients, from clients.csv."""

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


def steps(rows: Rows) -> str:
    """One line for each client, with the step of each head."""
    found = {(client_of(row), row["provider"]): row for row in rows if not row["reason"]}
    heads = dict.fromkeys(provider for _, provider in found)
    body = []
    for client in dict.fromkeys(client for client, _ in found):
        timed = (found.get((client, provider)) for provider in heads)
        body.append((client, *("{} ms, {} MiB".format(*time_and_memory(row, "step")) if row else "" for row in timed)))
    return markdown(["", *(HEADS[provider] for provider in heads)], body)


def of_heads(rows: Rows) -> str:
    """One line for each head of a client."""
    body = [(HEADS[row["provider"]], *figures(row)) for row in rows]
    return markdown(["", "step, ms", "MiB", "head, ms", "MiB", "errors"], body)


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


TABLES = {
    "clients.csv": lambda: steps(rows_of("clients")),
    "clients.csv, H100": lambda: of_heads(rows_of("clients", "nvidia-h100")),
}
