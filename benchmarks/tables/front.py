"""The table on the first screen of README.md and docs/: four steps, in PyTorch, in this package, and in the best other
library.

The best other is the fastest of the other libraries in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import steps
from .markdown import Rows, markdown, rows_of

OTHERS = {  # provider of a CSV -> its name
    "torch_compile": "torch.compile",
    "quack_chunked": "QuACK",
    "quack_scaled_exp": "QuACK",
    "liger": "Liger",
    "liger_loss_alone": "Liger, its loss alone",
    "cce": "Apple CCE",
}
HEADING = ["forward + backward, bf16", "eager", "torch's `F.linear_cross_entropy` [^2]", "flce_ops", "best other"]
Figures = tuple[float, float]  # ms, MiB


def lines(training: Rows, whole: Rows) -> str:
    body = []
    for shape in ("8192x4096x128256", "16384x896x151936"):
        timed = {
            provider: (float(row["ms"]), float(row["beyond_gradients_MiB"]))
            for (at, provider), row in steps.found(training).items()
            if at == shape
        }
        body.append(line(f"cross-entropy, {shape}", timed))
    timed = {row["provider"]: (float(row["step_ms"]), float(row["step_peak_MiB"])) for row in whole}
    alone = {"torch_eager": timed["own"], "ours": timed["flce_ops"], "liger_loss_alone": timed["liger_loss_alone"]}
    body.append(line("a Transformers model's whole step [^1]", alone))
    beside = {"ours": timed["liger_kernels_flce_ops_loss"], "liger": timed["liger"]}
    body.append(line("the same with Liger's other kernels", beside))
    return markdown(HEADING, body)


def line(name: str, timed: dict[str, Figures]) -> Sequence[str]:
    """The faster of this package and the best other is in bold."""
    best = min(OTHERS.keys() & timed.keys(), key=timed.__getitem__)
    own = text(timed.get("torch_function"))
    if own:
        own += f"; in chunks {text(timed['torch_chunked'])}"
    ours, other = text(timed["ours"]), f"{OTHERS[best]} {text(timed[best])}"
    if timed["ours"] < timed[best]:
        ours = f"**{ours}**"
    else:
        other = f"**{other}**"
    return name, text(timed.get("torch_eager")), own, ours, other


def text(timed: Figures | None) -> str:
    return "" if timed is None else f"{timed[0]:.1f} ms, {timed[1]:,.0f} MiB"


TABLES = {"front": lambda: lines(rows_of("readme", "nvidia-h100"), rows_of("clients", "nvidia-h100"))}
