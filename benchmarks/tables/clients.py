"""Tables of whole training steps of clients, from clients.csv."""

from __future__ import annotations

from .markdown import Rows, markdown, rows_of

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


def client_of(row: dict[str, str]) -> str:
    name, in_float32 = CLIENTS[row["client"]].format(row["loss"]), row["weights"] == "float32"
    return f"{name}, float32 weights" if in_float32 else name


def time_and_memory(row: dict[str, str], part: str) -> tuple[str, str]:
    return f"{float(row[f'{part}_ms']):.1f}", f"{float(row[f'{part}_peak_MiB']):,.0f}"


TABLES = {
    "clients.csv": lambda: steps(rows_of("clients")),
}
