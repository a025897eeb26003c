"""`python -m benchmarks.plot CSV`: PNGs from a CSV of `python -m benchmarks`, and from nothing else.

<csv>_time_<mode>.png      time relative to the floor, a group of bars for each shape
<csv>_memory_<mode>.png    time relative to the floor against memory beyond the gradients, a panel for each shape
<csv>_sweep_<N|D|V>.png    time relative to the floor, and memory, if one size varies and the other two are fixed
<csv>_error.png            errors of dX and dW, forward and backward

Rows with other data than the default get separate figures, named after the data: <csv>_time_<mode>_50%_ordered.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .data import IGNORED, PRIORS, TRAINED

TITLES = {
    "fwd_bwd": "forward + backward",
    "fwd": "forward only",
    "lora": "forward + backward, frozen weight",
    "none": 'reduction="none", forward + backward',
    "log_probs": "log-probabilities and entropy, forward + backward",
}
OURS = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef")
OTHERS = ("#d95f02", "#1b9e77", "#e7298a", "#7570b3", "#66a61e", "#e6ab02", "#a6761d", "#666666")
MOST = 3.0  # the axis ends here: a provider at 40 times the floor would flatten all others


class Point(NamedTuple):
    shape: tuple[int, int, int]  # N tokens, D hidden, V vocabulary
    mode: str
    provider: str
    x_floor: float
    beyond_MiB: float
    err_dx: float | None
    err_dw: float | None
    data: tuple[float, str]  # share of ignored tokens, prior


def read(path: Path) -> tuple[list[Point], str]:
    """The rows that have a time, and a line that says where they come from."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    points = [
        Point(
            (int(row["N"]), int(row["D"]), int(row["V"])),
            row["mode"],
            row["provider"],
            float(row["x_floor"]),
            float(row["beyond_gradients_MiB"]),
            float(row["err_dx"]) if row["err_dx"] else None,
            float(row["err_dw"]) if row["err_dw"] else None,
            (float(row.get("ignored") or IGNORED), row.get("prior") or PRIORS[0]),  # older CSVs have neither
        )
        for row in rows
        if row["x_floor"]
    ]
    first = rows[0] if rows else dict.fromkeys(("gpu", "torch", "triton", "commit", "dtype"), "")
    source = f"{first['gpu']}, {first['dtype']}, torch {first['torch']}, triton {first['triton']}, {first['commit']}"
    return points, source


def colours(points: Iterable[Point]) -> dict[str, str]:
    """One colour for each provider in all figures of a CSV: blues for this package, distinct ones for the others."""
    names = list(dict.fromkeys(point.provider for point in points if point.provider != "floor"))
    ours = [name for name in names if name.startswith("ours")]
    others = [name for name in names if not name.startswith("ours")]
    return {name: OURS[i % len(OURS)] for i, name in enumerate(ours)} | {
        name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)
    }


def text(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))


def draw_time(plt, points: list[Point], colour: dict[str, str]):
    shapes = list(dict.fromkeys(point.shape for point in points))
    figure, axes = plt.subplots(figsize=(2 + 2.6 * len(shapes), 4), layout="constrained")
    names = [name for name in colour if any(point.provider == name for point in points)]
    width = 0.84 / max(1, len(names))
    value = {(point.shape, point.provider): point.x_floor for point in points}
    for i, name in enumerate(names):
        for j, shape in enumerate(shapes):
            height = value.get((shape, name))
            if height is None:
                continue
            x = j + (i - (len(names) - 1) / 2) * width
            label = name if all((other, name) not in value for other in shapes[:j]) else None
            axes.bar(x, min(height, MOST), width, color=colour[name], label=label)
            y = min(height, MOST) + 0.02
            axes.text(x, y, f"{height:.2f}", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [text(shape) for shape in shapes])
    axes.set_ylim(0, min(MOST, max(value.values())) * 1.15)
    axes.set_ylabel("time / bare GEMMs")
    axes.legend(fontsize=7, ncols=2, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_memory(plt, points: list[Point], colour: dict[str, str]):
    shapes = list(dict.fromkeys(point.shape for point in points))
    figure, panels = plt.subplots(1, len(shapes), figsize=(3.6 * len(shapes), 3.6), squeeze=False, layout="constrained")
    for axes, shape in zip(panels[0], shapes, strict=True):
        for point in points:
            if point.shape == shape:
                beyond = max(point.beyond_MiB, 0.1)  # a logarithmic axis has no zero
                axes.scatter(point.x_floor, beyond, color=colour[point.provider], s=28)
        axes.set_title(text(shape), fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.margins(0.15)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set_xlabel("time / bare GEMMs")
    panels[0][0].set_ylabel("MiB beyond the gradients")
    names = {point.provider for point in points}
    dots = [
        plt.Line2D([], [], color=colour[name], marker="o", linestyle="", label=name) for name in colour if name in names
    ]
    figure.legend(handles=dots, fontsize=7, loc="outside right upper")
    return figure


def draw_sweep(plt, points: list[Point], axis: int, colour: dict[str, str]):
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = sorted({point.shape[axis] for point in points})
    for name in colour:
        line = sorted((point for point in points if point.provider == name), key=lambda point: point.shape[axis])
        if line:
            x = [point.shape[axis] for point in line]
            time.plot(x, [point.x_floor for point in line], "o-", ms=3, color=colour[name], label=name)
            memory.plot(x, [max(point.beyond_MiB, 0.1) for point in line], "o-", ms=3, color=colour[name])
    for axes in (time, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size}" for size in sizes], rotation=45, fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("NDV"[axis])
    time.set_ylim(0.9, min(MOST, max(point.x_floor for point in points)) * 1.05)
    time.set_ylabel("time / bare GEMMs")
    memory.set_yscale("log")
    memory.yaxis.set_major_formatter("{x:g}")
    memory.set_ylabel("MiB beyond the gradients")
    memory.legend(*time.get_legend_handles_labels(), fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_error(plt, points: list[Point], colour: dict[str, str]):
    shape = points[0].shape
    points = [point for point in points if point.shape == shape]
    figure, axes = plt.subplots(figsize=(6, 0.6 + 0.32 * len(points)), layout="constrained")
    for i, point in enumerate(reversed(points)):
        for error, marker in ((point.err_dx, "o"), (point.err_dw, "s")):
            if error is not None:
                axes.plot(error, i, marker, color=colour[point.provider], mfc="none" if marker == "s" else None)
    axes.set_yticks(range(len(points)), [point.provider for point in reversed(points)], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel(f"relative error at {text(shape)}: dX (dot), dW (square)")
    return figure


def sweep_of(points: list[Point], axis: int) -> list[Point]:
    """The largest set of points that differ in one size only, with at least three values of it."""
    groups: dict[tuple[int, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(tuple(size for i, size in enumerate(point.shape) if i != axis), []).append(point)
    best = max(groups.values(), key=lambda group: len({point.shape for point in group}), default=[])
    return best if len({point.shape for point in best}) >= 3 else []


def words_of(ignored: float, prior: str) -> tuple[str, str]:
    """What the data adds to the figures' names and titles."""
    share = "" if ignored == IGNORED else f"{100 * ignored:g}%"
    order = "" if prior == PRIORS[0] else prior
    words = (share and f"{share} of the tokens ignored", order and (order if order == TRAINED else f"{order} prior"))
    return "".join(f"_{word}" for word in (share, order) if word), "".join(f", {word}" for word in words if word)


def draw(path: Path, folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points, source = read(path)
    points = [point for point in points if point.provider != "floor"]
    colour, written = colours(points), []
    folder.mkdir(parents=True, exist_ok=True)
    for data in dict.fromkeys(point.data for point in points):
        suffix, said = words_of(*data)

        def save(figure, name: str, mode: str, suffix: str = suffix, said: str = said) -> None:
            figure.suptitle(f"{TITLES.get(mode, mode)}{said}\n{source}", fontsize=8)
            written.append(folder / f"{path.stem}_{name}{suffix}.png")
            figure.savefig(written[-1], dpi=140)
            plt.close(figure)

        of_data = [point for point in points if point.data == data]
        for mode in dict.fromkeys(point.mode for point in of_data):
            of_mode = [point for point in of_data if point.mode == mode]
            save(draw_time(plt, of_mode, colour), f"time_{mode}", mode)
            save(draw_memory(plt, of_mode, colour), f"memory_{mode}", mode)
        training = [point for point in of_data if point.mode == "fwd_bwd"]
        for axis, letter in enumerate("NDV"):
            if sweep := sweep_of(training, axis):
                save(draw_sweep(plt, sweep, axis, colour), f"sweep_{letter}", "fwd_bwd")
        if training:
            save(draw_error(plt, training, colour), "error", "fwd_bwd")
    return written


def main(argv: Sequence[str] | None = None) -> list[Path]:
    parser = argparse.ArgumentParser("python -m benchmarks.plot", description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=None, help="folder of the PNGs; the CSV's own when not given")
    options = parser.parse_args(argv)
    written = draw(options.csv, options.out or options.csv.parent)
    for path in written:
        print(path)
    return written


if __name__ == "__main__":
    main()
