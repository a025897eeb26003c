"""`python -m benchmarks.plot CSV`: PNGs from a CSV of `python -m benchmarks`, and from nothing else.

<csv>_<mode>.png            time relative to the floor, a group of bars for each shape
<csv>_sweep_<N|D|V>.png     forward and backward: time relative to the floor, and memory, if one size varies

Rows with other data than the default get separate figures, named after the data: <csv>_<mode>_0.5_ordered.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from .data import IGNORED, PRIORS

OURS = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef")
OTHERS = ("#d95f02", "#1b9e77", "#e7298a", "#7570b3", "#66a61e", "#e6ab02", "#a6761d", "#666666")
MOST = 3.0  # the axis ends here: a provider at 40 times the floor would flatten all others
Rows = list[dict[str, str]]


def shape_of(row: dict[str, str]) -> tuple[int, ...]:  # N tokens, D hidden, V vocabulary
    return tuple(int(row[size]) for size in "NDV")


def data_of(row: dict[str, str]) -> str:
    """What other data than the default add to a figure's name."""
    share, prior = row.get("ignored") or f"{IGNORED}", row.get("prior") or PRIORS[0]
    return f"_{share}" * (float(share) != IGNORED) + f"_{prior}" * (prior != PRIORS[0])


def colours(rows: Iterable[dict[str, str]]) -> dict[str, str]:
    """One colour for each provider in all figures of a CSV: blues for this package, distinct ones for the others."""
    names = list(dict.fromkeys(row["provider"] for row in rows))
    found: dict[str, str] = {}
    for palette, of_palette in (
        (OURS, [name for name in names if name.startswith("ours")]),
        (OTHERS, [name for name in names if not name.startswith("ours")]),
    ):
        found |= {name: palette[i % len(palette)] for i, name in enumerate(of_palette)}
    return found


def draw_time(plt, rows: Rows, colour: dict[str, str]):
    shapes = list(dict.fromkeys(map(shape_of, rows)))
    names = [name for name in colour if any(row["provider"] == name for row in rows)]
    figure, axes = plt.subplots(figsize=(2 + 2.6 * len(shapes), 4), layout="constrained")
    width = 0.84 / len(names)
    for i, name in enumerate(names):
        bars = {shape_of(row): float(row["x_floor"]) for row in rows if row["provider"] == name}
        at = [shapes.index(shape) + (i - (len(names) - 1) / 2) * width for shape in bars]
        heights = [min(height, MOST) for height in bars.values()]
        axes.bar(at, heights, width, color=colour[name], label=name)
        for x, height, text in zip(at, heights, bars.values()):
            axes.text(x, height + 0.02, f"{text:.2f}", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), ["x".join(map(str, shape)) for shape in shapes])
    axes.set_ylabel("time / bare GEMMs")
    axes.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_sweep(plt, rows: Rows, axis: int, colour: dict[str, str]):
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = sorted({shape_of(row)[axis] for row in rows})
    for name in colour:
        of_name = sorted((row for row in rows if row["provider"] == name), key=lambda row: shape_of(row)[axis])
        x = [shape_of(row)[axis] for row in of_name]
        time.plot(x, [float(row["x_floor"]) for row in of_name], "o-", ms=3, color=colour[name], label=name)
        beyond = [max(float(row["beyond_gradients_MiB"]), 0.1) for row in of_name]  # a logarithmic axis has no zero
        memory.plot(x, beyond, "o-", ms=3, color=colour[name])
    for axes, label in ((time, "time / bare GEMMs"), (memory, "MiB beyond the gradients")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size}" for size in sizes], rotation=45, fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("NDV"[axis])
        axes.set_ylabel(label)
    time.set_ylim(0.9, MOST)
    memory.set_yscale("log")
    memory.legend(*time.get_legend_handles_labels(), fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def sweep_of(rows: Rows, axis: int) -> Rows:
    """The largest set of rows that differ in one size only, with at least three values of it."""
    groups: dict[tuple[int, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(size for i, size in enumerate(shape_of(row)) if i != axis), []).append(row)
    best = max(groups.values(), key=lambda group: len(set(map(shape_of, group))), default=[])
    return best if len(set(map(shape_of, best))) >= 3 else []


def draw(path: Path, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["x_floor"] and row["provider"] != "floor"]
    colour, figures = colours(rows), {}
    for data in dict.fromkeys(map(data_of, rows)):
        of_data = [row for row in rows if data_of(row) == data]
        for mode in dict.fromkeys(row["mode"] for row in of_data):
            figures[mode + data] = draw_time(plt, [row for row in of_data if row["mode"] == mode], colour)
        training = [row for row in of_data if row["mode"] == "fwd_bwd"]
        for axis, letter in enumerate("NDV"):
            if sweep := sweep_of(training, axis):
                figures[f"sweep_{letter}{data}"] = draw_sweep(plt, sweep, axis, colour)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        source = "{gpu}, {dtype}, torch {torch}, triton {triton}, {commit}".format(**rows[0])
        figure.suptitle(f"{name.replace('_', ' ')}\n{source}", fontsize=8)
        figure.savefig(folder / f"{path.stem}_{name}.png", dpi=140)
        plt.close(figure)
    return [folder / f"{path.stem}_{name}.png" for name in figures]


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser("python -m benchmarks.plot", description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="folder of the PNGs; the CSV's own when not given")
    options = parser.parse_args(argv)
    written = draw(options.csv, options.out or options.csv.parent)
    print(*written, sep="\n")
    return written


if __name__ == "__main__":
    main()
