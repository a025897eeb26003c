"""The two CSV files of a run, and the plot and the table, which are made only from these files.

loss.csv    a column for the step, and one of losses for each head
heads.csv   head, tokens_per_s, temporary_MiB: a line for each head
"""

import csv
from pathlib import Path

LOSS_CSV, HEADS_CSV, PLOT = "loss.csv", "heads.csv", "train_gpt.png"
COLORS = ["#d1495b", "#30638e"]


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot(folder: Path) -> Path | None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    losses, heads = read_csv(folder / LOSS_CSV), read_csv(folder / HEADS_CSV)
    figure, (curves, memory, speed) = pyplot.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=[2, 1, 1], layout="constrained"
    )
    names = [head["head"] for head in heads]
    first, second = ([float(row[name]) for row in losses] for name in names)
    steps = [int(row["step"]) for row in losses]
    curves.plot(steps, first, color=COLORS[0], linewidth=4, alpha=0.5, label=names[0])
    curves.plot(steps, second, "--", color=COLORS[1], linewidth=1.5, label=names[1])  # drawn over the broad line
    worst = max(abs(a - b) for a, b in zip(first, second, strict=True))
    curves.set_title(f"training loss, at most {worst:.1e} apart", fontsize=11)
    curves.set(xlabel="step", ylabel="nats per token")
    curves.legend()

    labels = [name.replace("(", "\n(").replace("ops.", "ops.\n") for name in names]
    for axes, column, title in (
        (memory, "temporary_MiB", "temporary memory of the head,\nforward + backward, MiB"),
        (speed, "tokens_per_s", "training of the whole model,\ntokens / s"),
    ):
        bars = axes.bar(labels, [float(head[column]) for head in heads], color=COLORS, width=0.6)
        axes.bar_label(bars, fmt="{:,.0f}")
        axes.set_title(title, fontsize=11)
        axes.tick_params(axis="x", labelsize=9)
    for axes in (curves, memory, speed):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / PLOT, dpi=130)
    pyplot.close(figure)
    return folder / PLOT


def table(folder: Path) -> str:
    last = read_csv(folder / LOSS_CSV)[-1]
    lines = [f"{'head':<32}{'last loss':>10}{'tokens/s':>10}{'temporary MiB':>15}"]
    for head in read_csv(folder / HEADS_CSV):
        name, speed, memory = head["head"], float(head["tokens_per_s"]), float(head["temporary_MiB"])
        lines.append(f"{name:<32}{float(last[name]):>10.4f}{speed:>10,.0f}{memory:>15.1f}")
    return "\n".join(lines)
