"""`python -m benchmarks.docs_figures`: draws the figures of README.md and docs/ from CSVs.

docs/figures/time_against_memory.svg       a training step at one shape: time over the bare GEMMs and temporary memory
docs/figures/error_against_dtype.svg       error of dX and dW against float64, a row per results/*/numerics.csv
docs/figures/sparse_training.svg           losses of models trained with sparse gradients: training_plot.py
"""

# N tokens, D hidden, V vocabulary

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .data import is_usual
from .numerics_table import PROVIDERS
from .report import REPOSITORY
from .tables.markdown import RESULTS, rows_of
from .training_plot import draw as sparse_training

FOLDER = REPOSITORY / "docs" / "figures"
TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256  # the sizes that stay fixed while another one varies
# provider: label, colour, the label's place relative to its point in (points right, points up, alignment)
OURS_AT = {  # label places of this package's points, by workspace
    "ours_128MiB": ("128 MiB", "#08519c", (11, 6, "left")),
    "ours": ("512 MiB, the default", "#08519c", (11, 4, "left")),
    "ours_2GiB": ("2 GiB", "#08519c", (-11, 0, "right")),
}
PEERS = {
    "torch_eager": ("torch, eager", "#7f7f7f", (10, 0, "left")),
    "torch_compile": ("torch.compile", "#d95f02", (10, -9, "left")),
    "torch_chunked": ("torch, chunked", "#7f7f7f", (10, 0, "left")),
    "quack_chunked": ("QuACK chunked", "#1b9e77", (10, 7, "left")),
    "quack_scaled_exp": ("QuACK scaled-exp", "#1b9e77", (10, 0, "left")),
    "liger": ("Liger", "#7570b3", (10, 0, "left")),
    "liger_fp32": ("Liger, float32 sum", "#7570b3", (10, 0, "left")),
    "cce": ("Apple CCE", "#a6761d", (-11, 0, "right")),
    "cce_exact": ("Apple CCE, unfiltered", "#a6761d", (-11, 0, "right")),
}


def is_of_training(row: dict[str, str]) -> bool:
    return bool(row["mode"] == "fwd_bwd" and row["ms"] and is_usual(row))


def time_against_memory(plt, path: Path):
    """One run of one shape: this package as a line over its workspaces, every other provider with a time as a point."""
    rows = list(filter(is_of_training, rows_of(path)))
    at_shape = {  # provider: (ms, MiB)
        row["provider"]: (float(row["ms"]), float(row["beyond_gradients_MiB"]))
        for row in rows
        if (int(row["N"]), int(row["D"]), int(row["V"])) == (TOKENS, HIDDEN, VOCABULARY)
    }
    floor, _ = at_shape["floor"]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")

    line = [at_shape[provider] for provider in OURS_AT]
    axes.plot(*zip(*line), "o-", color="#08519c", markersize=8, linewidth=2.2, zorder=3)
    axes.text(floor * 1.01, 13, "flce_ops, by workspace", color="#08519c", fontsize=11, weight="bold")
    for provider, (text, colour, place) in (OURS_AT | PEERS).items():
        if provider in at_shape:
            axes.plot(*at_shape[provider], "o", color=colour, markersize=8)
            style = {"textcoords": "offset points", "ha": place[2], "va": "center", "color": colour, "fontsize": 11}
            axes.annotate(text, at_shape[provider], place[:2], **style)
    axes.axvline(floor, color="black", linewidth=1, linestyle=":")
    axes.text(floor * 1.01, 0.4, "three bare cuBLAS GEMMs", fontsize=10)
    axes.set_xscale("log")
    axes.set_xlim(floor * 0.84, floor * 4.5)
    ticks = (1, 1.25, 1.5, 2, 3, 4)
    axes.set_xticks([floor * tick for tick in ticks], [f"{floor * tick:.0f} ms\n{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_ylim(0.3, 3e4)
    axes.set_yticks([1, 10, 100, 1000, 10000], ["1 MiB", "10 MiB", "100 MiB", "1,000 MiB", "10,000 MiB"])
    axes.grid(alpha=0.25)
    axes.set_xlabel("time of a training step, and over the bare GEMMs")
    axes.set_ylabel("peak memory beyond the gradients")
    shape = f"{TOKENS:,} tokens x {HIDDEN:,} hidden x {VOCABULARY:,} classes"
    axes.set_title("{}, {dtype}, one {gpu}".format(shape, **rows[0]), fontsize=11)
    return figure


def error_against_dtype(plt, results: Path):
    paths = sorted(results.glob("*/numerics.csv"))
    figure, panels = plt.subplots(
        len(paths), 2, figsize=(9, 3.4 * len(paths)), squeeze=False, sharey=True, layout="constrained"
    )
    for path, (left, right) in zip(paths, panels):
        rows = rows_of(path)
        dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
        for axes, column, title in ((left, "err_dx", "dX"), (right, "err_dw", "dW")):
            for i, (provider, colour) in enumerate(zip(PROVIDERS, ("#bdbdbd", "#7f7f7f", "#08519c", "#6baed6"))):
                error = {row["dtype"]: float(row[column]) for row in rows if row["provider"] == provider}
                x = [j + 0.2 * (i - 1.5) for j in range(len(dtypes))]
                axes.bar(x, [error[dtype] for dtype in dtypes], 0.19, color=colour, label=provider)
            axes.set_yscale("log")
            axes.set_xticks(range(len(dtypes)), dtypes)
            axes.set_title(f"{title}: {rows[0]['device']}, {rows[0]['N']}x{rows[0]['D']}x{rows[0]['V']}", fontsize=9)
            axes.grid(alpha=0.25, axis="y")
        left.set_ylabel("relative error")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), fontsize=8, ncols=len(PROVIDERS), loc="outside lower center"
    )
    return figure


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser("python -m benchmarks.docs_figures", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args(argv).out
    import matplotlib

    matplotlib.use("Agg")
    # makes the file the same for the same picture
    matplotlib.rcParams.update({"svg.hashsalt": "flce_ops", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "time_against_memory": time_against_memory(plt, RESULTS / "nvidia-h200" / "fwd_bwd.csv"),
        "error_against_dtype": error_against_dtype(plt, RESULTS),
        "sparse_training": sparse_training(plt, RESULTS / "nvidia-h200" / "training.csv"),
    }
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.svg")
        figure.savefig(written[-1], metadata={"Date": None})
        plt.close(figure)
    return written


if __name__ == "__main__":
    for path in main():
        print(path)
