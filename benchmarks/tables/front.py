"""The table on the first screen of README.md and docs/: four steps, in PyTorch, in this package, and in the best other
library.

The best other is the fastest of the other libraries in the same run. It is torch.compile if PyTorch's column is eager.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import clients, objectives, steps
from .markdown import Rows, markdown, rows_of

OTHERS = {  # provider of a CSV -> its name
    "torch_compile": "torch.compile",
    "torch_chunked": "torch, chunked",
    "quack_chunked": "QuACK",
    "quack_scaled_exp": "QuACK",
    "liger": "Liger",
    "liger_loss_alone": "Liger, its loss alone",
    "cce": "Apple CCE",
    "trl": "TRL",
    "verl": "verl",
}
Figures = tuple[float, float]  # ms, MiB


def lines(training: Rows, others: Rows, whole: Rows) -> str:
    body = []
    for shape in ("8192x4096x128256", "16384x896x151936"):
        timed = {
            provider: figures(row) for (at, provider), row in steps.found(training).items() if at == shape and row["ms"]
        }
        body.append(line(f"cross-entropy, {shape}", timed, "torch_eager"))
    shape = "4096x4096x151936"
    providers = ("ours", "torch_compile", "trl", "verl")
    found = {
        provider: objectives.found(others, shape, objectives.ours("policy", provider=provider))
        for provider in providers
    }
    timed = {provider: figures(row) for provider, row in found.items() if row}
    body.append(line(f"policy loss, {shape}", timed, "torch_compile"))
    timed = {
        row["provider"]: (float(row["step_ms"]), float(row["step_peak_MiB"]))
        for row in whole
        if clients.client_of(row) == clients.CLIENTS["transformers"].format("labels")
    }
    timed["ours"] = timed.pop("flce_ops")
    body.append(line("a Transformers model's whole step [^1]", timed, "own"))
    return markdown(["forward + backward, bf16", "PyTorch", "flce_ops", "best other"], body)


def figures(row: dict[str, str]) -> Figures:
    return float(row["ms"]), float(row["beyond_gradients_MiB"])


def line(name: str, timed: dict[str, Figures], yours: str) -> Sequence[str]:
    best = min((provider for provider in timed if provider in OTHERS and provider != yours), key=timed.__getitem__)
    compiled = "compiled " if yours == "torch_compile" else ""
    ours = text(timed["ours"])
    return name, compiled + text(timed[yours]), f"**{ours}**", f"{OTHERS[best]} {text(timed[best])}"


def text(timed: Figures) -> str:
    ms, mib = timed
    return f"{ms:.1f} ms, {mib:,.0f} MiB"


TABLES = {"front": lambda: lines(rows_of("fwd_bwd"), rows_of("objectives"), rows_of("clients"))}
