"""`python -m benchmarks.docs_figures`: the figures of docs/, from committed CSVs and from the planner's arithmetic.

docs/figures/memory_against_vocabulary.svg temporary memory of a training step: lines planned, dots measured
docs/figures/time_against_tokens.svg       its time per token, likewise
docs/figures/error_against_dtype.svg       error of dX and dW against float64, a row per results/*/numerics.csv

Measured are the rows of mode fwd_bwd in every CSV of benchmarks/results/nvidia-h200 that has fwd_bwd.csv's columns. The
planner needs triton: the chunk sizes are the kernels' own (flce_ops/plan).
"""

# N tokens, D hidden, V vocabulary

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import flce_ops
from flce_ops.plan import Head, cuts, device_of
from flce_ops.plan.seconds import seconds

from .numerics_table import PROVIDERS
from .report import REPOSITORY

FOLDER = REPOSITORY / "docs" / "figures"
RESULTS = REPOSITORY / "benchmarks" / "results"
TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 128256  # what stays fixed where another size varies
MIB = 2**20
LINES = {  # provider of the CSVs: label, colour, cut, workspace
    "torch_eager": ("F.cross_entropy, float32 logits", "#7f7f7f", cuts.dense_eager, 512),
    "torch_compile": ("F.cross_entropy, torch.compile", "#d95f02", cuts.dense_compiled, 512),
    "ours": ("flce_ops, 512 MiB", "#08519c", cuts.one_pass, 512),
    "ours_64MiB": ("flce_ops, 64 MiB", "#6baed6", cuts.one_pass, 64),
}
COLUMNS = {"N", "D", "V", "mode", "provider", "ms", "beyond_gradients_MiB"}


def measured(folder: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if COLUMNS <= set(reader.fieldnames or ()):
                rows += [row for row in reader if row["mode"] == "fwd_bwd" and row["ms"]]
    return rows


def planned(provider: str, shape: tuple[int, int, int]) -> tuple[Head, cuts.Cut]:
    _, _, cut, workspace = LINES[provider]
    head = Head(*shape, torch.bfloat16)
    with flce_ops.workspace(workspace * MIB):
        return head, cut(head)


def draw(plt, axes, sizes: list[int], shape_of: Callable, value_of: Callable, dots: dict[str, list]) -> None:
    for provider, (label, colour, _, _) in LINES.items():
        values = [value_of(*planned(provider, shape_of(size))) for size in sizes]
        axes.plot(sizes, values, "--" if provider.startswith("torch") else "-", color=colour, label=label)
        axes.plot(*zip(*dots[provider]) if dots[provider] else ([], []), "o", color=colour, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=35, fontsize=8)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    handles.append(plt.Line2D([], [], marker="o", linestyle="", color="black"))
    axes.legend(handles, [*labels, "measured, H200"], fontsize=8)


def memory_against_vocabulary(plt, rows: list[dict[str, str]]):
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    dots = {  # what the dense pair takes depends on D through the gradients alone, ours hardly
        provider: [
            (int(row["V"]), float(row["beyond_gradients_MiB"]))
            for row in rows
            if row["provider"] == provider and int(row["N"]) == TOKENS
        ]
        for provider in LINES
    }
    draw(
        plt,
        axes,
        [8192, 16384, 32000, 64000, 128256, 256000],
        lambda vocabulary: (TOKENS, HIDDEN, vocabulary),
        lambda head, cut: cut.temporaries / MIB,
        dots,
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(f"vocabulary (tokens {TOKENS:,}, bfloat16)")
    axes.set_ylabel("MiB beyond weight, input, gradients")
    return figure


def time_against_tokens(plt, rows: list[dict[str, str]]):
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    device = device_of("h200", torch.bfloat16, 1)
    dots = {
        provider: [
            (int(row["N"]), 1e3 * float(row["ms"]) / int(row["N"]))
            for row in rows
            if row["provider"] == provider and (int(row["D"]), int(row["V"])) == (HIDDEN, VOCABULARY)
        ]
        for provider in LINES
    }
    draw(
        plt,
        axes,
        [1024, 2048, 4096, 8192, 16384, 32768, 65536],
        lambda tokens: (tokens, HIDDEN, VOCABULARY),
        lambda head, cut: 1e6 * seconds(head, cut, device) / head.tokens,
        dots,
    )
    axes.set_xlabel(f"tokens (hidden {HIDDEN:,}, vocabulary {VOCABULARY:,}, bfloat16, one H200)")
    axes.set_ylim(0, 10)
    axes.set_ylabel("microseconds a token, forward + backward")
    return figure


def error_against_dtype(plt, results: Path):
    paths = sorted(results.glob("*/numerics.csv"))
    figure, panels = plt.subplots(
        len(paths), 2, figsize=(9, 3.4 * len(paths)), squeeze=False, sharey=True, layout="constrained"
    )
    for path, (left, right) in zip(paths, panels):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
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
    import matplotlib

    matplotlib.use("Agg")
    # the same picture gives the same file
    matplotlib.rcParams.update({"svg.hashsalt": "flce_ops", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    parser = argparse.ArgumentParser("python -m benchmarks.docs_figures", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args(argv).out
    folder.mkdir(parents=True, exist_ok=True)
    rows = measured(RESULTS / "nvidia-h200")
    figures = {
        "memory_against_vocabulary": memory_against_vocabulary(plt, rows),
        "time_against_tokens": time_against_tokens(plt, rows),
        "error_against_dtype": error_against_dtype(plt, RESULTS),
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
