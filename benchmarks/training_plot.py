"""`python -m benchmarks.training_plot CSV`: a PNG of what `python -m benchmarks.training` wrote, and of nothing else.

Left: held-out loss by steps, a line a setting, in the mean over seeds. Right: what a run's held-out loss is above that
of the exact run of the same seed, a dot a run, over all tokens and over those of rare classes; grey: the range of the
exact runs themselves, about their mean.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from .plot import OTHERS, OURS

EXACT = "exact"
LABELS = {
    EXACT: "exact",
    "unbiased_12": "unbiased, $2^{-12}$",
    "unbiased_10": "unbiased, $2^{-10}$",
    "unbiased_8": "unbiased, $2^{-8}$",
    "cce": "Apple CCE, its filter",
    "tiles_12": "that filter here",
    "drop_12": "dropped below $2^{-12}$",
}
COLOURS = dict(zip(LABELS, (*OURS[:4], *OTHERS), strict=False))
LOSSES = {"held_out_loss": "all tokens", "rare_loss": "rarest 10 %", "rarest_loss": "rarest 1 %"}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(plt, path: Path):
    runs = [row for row in rows_of(path) if row["held_out_loss"] and not row["reason"]]
    points = [row for row in rows_of(path.with_name(f"{path.stem}_curves.csv")) if row["held_out_loss"]]
    settings = [name for name in LABELS if any(row["setting"] == name for row in runs)]
    figure, (curves, ends) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")

    for name in settings:
        seeds = {row["seed"] for row in runs if row["setting"] == name}
        of_setting = [row for row in points if row["setting"] == name and row["seed"] in seeds]
        steps = sorted({int(row["step"]) for row in of_setting if int(row["step"])})
        means = [fmean(float(row["held_out_loss"]) for row in of_setting if int(row["step"]) == step) for step in steps]
        curves.plot(steps, means, "o-", markersize=3, color=COLOURS[name], label=LABELS[name])
    curves.set_xlabel("steps")
    curves.set_ylabel("loss of held-out text, nats a token")
    curves.grid(alpha=0.25)
    curves.legend(fontsize=8)

    others = [name for name in settings if name != EXACT]
    for i, column in enumerate(LOSSES):
        exact = {row["seed"]: float(row[column]) for row in runs if row["setting"] == EXACT}
        mean = fmean(exact.values())
        spread = [value - mean for value in exact.values()]
        ends.bar(i, max(spread) - min(spread), 0.9, min(spread), color="#dddddd", zorder=0)
        for j, name in enumerate(others):
            above = [
                float(row[column]) - exact[row["seed"]]
                for row in runs
                if row["setting"] == name and row["seed"] in exact
            ]
            x = i + (j - (len(others) - 1) / 2) * 0.8 / len(others)
            ends.plot([x] * len(above), above, "o", markersize=5, color=COLOURS[name])
    ends.axhline(0, color="black", linewidth=0.8)
    ends.set_xticks(range(len(LOSSES)), LOSSES.values())
    ends.set_ylabel("held-out loss above the exact run's")
    ends.grid(alpha=0.25, axis="y")
    first = runs[0]
    figure.suptitle(
        f"{int(first['parameters']) / 1e6:.0f}M parameters, D = {first['D']}, V = {first['V']},"
        f" {first['steps']} steps of {first['step_tokens']} tokens; {first['gpu']}, {first['commit']}",
        fontsize=9,
    )
    return figure


def main(argv: Sequence[str] | None = None) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parser = argparse.ArgumentParser("python -m benchmarks.training_plot", description=__doc__)
    parser.add_argument("csv", type=Path)
    path = parser.parse_args(argv).csv
    written = path.with_suffix(".png")
    draw(plt, path).savefig(written, dpi=140)
    return written


if __name__ == "__main__":
    print(main())
