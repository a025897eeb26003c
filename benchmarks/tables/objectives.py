"""Tables of the other objectives, from objectives.csv and objective_errors.csv."""

from __future__ import annotations

from .markdown import Rows, error, markdown, measured_at, rows_of, shape_of

BFLOAT16, FLOAT16 = "bfloat16", "float16"
Step = tuple[str, str, str]  # mode, provider, dtype


def ours(mode: str, dtype: str = BFLOAT16, provider: str = "ours") -> Step:
    return mode, provider, dtype


def options() -> list[tuple[str, Step, Step]]:
    """An option's name, a step with it, and the step without it."""
    plain, per_token = ours("fwd_bwd"), {"none": '`reduction="none"`', "log_probs": "`linear_log_probs`, entropy"}
    lines = [("`target_weight`, K = 64", ours("soft64"), plain), ("`label_smoothing`", ours("smoothing"), plain)]
    lines.append(("`label_smoothing` under a `softcap`", ours("softcap_smoothing"), ours("softcap")))
    for mode, name in per_token.items():
        lines.append((name, ours(mode), plain))
        lines.append((f"{name}, logits of all tokens saved", ours(mode, provider=ROOM), plain))
    lines.append(("class indices: float16 in place of bfloat16", ours("fwd_bwd", FLOAT16), plain))
    return [*lines, ("all eight metrics", ours("metrics"), plain)]


ROOM = "ours_retained"  # the provider that can save the logits of all tokens


def shapes_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(shape_of(row) for row in rows))


def found(rows: Rows, shape: str, step: Step) -> dict[str, str] | None:
    """The row of a step, if it has a time."""
    for row in rows:
        if (row["mode"], row["provider"], row["dtype"]) == step and shape_of(row) == shape and row["ms"]:
            return row
    return None


def ratio(rows: Rows, shape: str, step: Step, beside: Step) -> str:
    over, under = found(rows, shape, step), found(rows, shape, beside)
    return f"{float(over['ms']) / float(under['ms']):.3f}" if over and under else ""


def costs(rows: Rows) -> str:
    """The time with an option, relative to the time without it."""
    shapes = shapes_of(rows)
    body = [(name, *(ratio(rows, shape, step, beside) for shape in shapes)) for name, step, beside in options()]
    return markdown(["time over the plain step's", *shapes], body)


PEERS = {"liger": "Liger", "trl": "TRL", "verl": "verl"}
TIMES = {  # mode: its name on the page, and its peers with their names
    "fwd_bwd": ("class indices", {}),
    "policy": ("`linear_policy_loss`", {"verl": "verl", "trl": "TRL"}),
    "none": ('`reduction="none"`', {"verl": "verl", "trl": "TRL"}),
    "log_probs": ("log-probabilities and entropies", {"verl": "verl", "trl": "TRL"}),
    "kl_forward": ("forward divergence", {"liger": "Liger"}),
    "kl_jsd": ("jsd", {"liger": "Liger"}),
}


def times(rows: Rows) -> str:
    """ms, the shortest of a line in bold, and MiB beyond the gradients."""
    body = []
    for shape in shapes_of(rows):
        for mode, (name, peers) in TIMES.items():
            floor = found(rows, shape, ours(mode, provider="floor"))
            if floor:
                name = f"{name}, {shape} (GEMMs {float(floor['ms']):.1f})"
            providers = {"ours": "", "torch_compile": "", **peers}
            timed = {provider: found(rows, shape, ours(mode, provider=provider)) for provider in providers}
            shortest = min((float(row["ms"]) for row in timed.values() if row), default=0.0)
            cells = {provider: figures(row, shortest) for provider, row in timed.items() if row}
            others = (f"{label} {cells[peer]}" for peer, label in peers.items() if peer in cells)
            body.append((name, cells.get("ours", ""), cells.get("torch_compile", ""), "; ".join(others)))
    heading = ["", "flce_ops", "torch.compile of the plain formula", "others"]
    return f"{measured_at(rows, PEERS)}\n\n{markdown(heading, body)}"


def figures(row: dict[str, str], shortest: float) -> str:
    ms, mark = float(row["ms"]), "**" if float(row["ms"]) == shortest else ""
    return f"{mark}{ms:.1f}{mark}, {float(row['beyond_gradients_MiB']):,.0f} MiB"


DTYPES = (BFLOAT16, FLOAT16)


def error_table(rows: Rows) -> str:
    """The largest error over the paths of a 16-bit dtype: of gradients. Metrics have none. A divergence of
    probabilities has no line of its own: its errors are no larger than those of a divergence from a head.
    """
    body = []
    names = {row["objective"] for row in rows if row["err_dx"] and not row["objective"].endswith("of probabilities")}
    for name in sorted(names):
        cells = []
        for dtype in DTYPES:
            of_dtype = [row for row in rows if (row["objective"], row["dtype"]) == (name, dtype)]
            cells += [largest(of_dtype, "err", ("dx", "dw")), largest(of_dtype, "torch", ("dx", "dw"))]
        body.append((name, *cells))
    return markdown(["", *(heading for dtype in DTYPES for heading in (dtype, "plain torch"))], body)


def largest(rows: Rows, whose: str, columns: tuple[str, ...]) -> str:
    if not rows:
        return ""
    return error(max(float(row[f"{whose}_{column}"]) for row in rows for column in columns))


TABLES = {
    "objectives: times": lambda: times(rows_of("objectives")),
    "objectives: options": lambda: costs(rows_of("objectives")),
    "objective errors": lambda: error_table(rows_of("objective_errors")),
}
