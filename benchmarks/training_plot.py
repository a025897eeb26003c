"""The figure of what `python -m benchmarks.training` wrote, for benchmarks.docs_figures.

Left: the training loss, one line for each run. Middle: its difference from the exact run of the same seed, which has
the same batches, one line for each setting: the mean over seeds and over 100 steps. Right: the same for held-out losses
at the end, one dot for each run, over all tokens and over rare classes. Grey is the range of the exact runs about their
mean.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from .tables.markdown import rows_of
from .tables.training import EXACT, LABELS, above_exact

OURS = ("#08519c", "#3182bd", "#6baed6", "#9ecae1")
OTHERS = ("#d95f02", "#1b9e77", "#e7298a", "#7570b3", "#66a61e", "#e6ab02", "#a6761d", "#666666")
COLOURS = dict(zip(LABELS, (*OURS, *OTHERS), strict=False))
SMOOTH = 5  # points
LOSSES = {"held_out_loss": "all tokens", "rare_loss": "rarest 10 %", "rarest_loss": "rarest 1 %"}


def draw(plt, path: Path):
    runs = [row for row in rows_of(path) if row["held_out_loss"] and not row["reason"]]
    settings = [name for name in LABELS if any(row["setting"] == name for row in runs)]
    curves = {(row["setting"], row["seed"]): ([], []) for row in runs}
    for row in rows_of(path.with_name(f"{path.stem}_curves.csv")):
        if row["loss"] and (row["setting"], row["seed"]) in curves:
            steps, losses = curves[row["setting"], row["seed"]]
            steps.append(int(row["step"]))
            losses.append(float(row["loss"]))
    figure, (left, middle, ends) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name in settings:
        above = []
        for (setting, seed), (steps, losses) in curves.items():
            if setting == name:
                left.plot(steps, losses, linewidth=0.8, color=COLOURS[name])
                exact = curves.get((EXACT, seed), ((), ()))[1]
                if name != EXACT and len(exact) == len(losses):
                    above.append([loss - other for loss, other in zip(losses, exact, strict=True)])
        left.plot([], [], color=COLOURS[name], label=LABELS[name])
        if above:
            means = [fmean(values) for values in zip(*above, strict=True)]
            smooth = [fmean(means[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(means))]
            middle.plot(steps, smooth, color=COLOURS[name])
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    left.set_ylabel("training loss, nats a token")
    left.legend(fontsize=8)
    middle.axhline(0, color="black", linewidth=0.8)
    middle.set_ylabel("training loss above the exact run's")
    for axes in (left, middle):
        axes.set_xlabel("steps")
        axes.grid(alpha=0.25)

    others = [name for name in settings if name != EXACT]
    for i, column in enumerate(LOSSES):
        exact = [float(row[column]) for row in runs if row["setting"] == EXACT]
        ends.bar(i, max(exact) - min(exact), 0.9, min(exact) - fmean(exact), color="#dddddd", zorder=0)
        for j, name in enumerate(others):
            above = above_exact(runs, name, column)
            x = i + (j - (len(others) - 1) / 2) * 0.8 / len(others)
            ends.plot([x] * len(above), above, "o", markersize=5, color=COLOURS[name])
    ends.axhline(0, color="black", linewidth=0.8)
    ends.set_xticks(range(len(LOSSES)), LOSSES.values())
    ends.set_ylabel("held-out loss above the exact run's")
    ends.grid(alpha=0.25, axis="y")
    said = "{:.0f}M parameters, D = {D}, V = {V}, {steps} steps of {step_tokens} tokens; {gpu}, {commit}"
    figure.suptitle(said.format(int(runs[0]["parameters"]) / 1e6, **runs[0]), fontsize=9)
    return figure
