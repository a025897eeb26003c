"""Tables of training runs, from training.csv: one line for each setting, the range over its runs, and the range of the
differences from the exact run of the same seed.

And of steps with a sparse gradient, on trained models' hidden states and a flat prior, from sparse.csv.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .markdown import Rows, error, markdown, rows_of, shape_of, span

EXACT = "exact"
LABELS = {
    EXACT: "exact",
    "unbiased_12": "unbiased, $2^{-12}$",
    "unbiased_10": "unbiased, $2^{-10}$",
    "unbiased_8": "unbiased, $2^{-8}$",
    "cce": "Apple's CCE, its filter",
    "drop_12": "drop, $2^{-12}$",
}


def finished(name: str) -> list[dict[str, str]]:
    return [row for row in rows_of(name) if row["held_out_loss"]]


def above_exact(rows: Rows, setting: str, column: str) -> list[float]:
    """For each run, the difference from the exact run of the same seed."""
    exact = {row["seed"]: float(row[column]) for row in rows if row["setting"] == EXACT}
    return [
        float(row[column]) - exact[row["seed"]] for row in rows if row["setting"] == setting and row["seed"] in exact
    ]


def between(values: Sequence[float], form: str) -> str:
    return span(values, lambda value: format(value, form))


def losses(runs: Rows) -> str:
    body = []
    for name, label in LABELS.items():
        of_setting = [row for row in runs if row["setting"] == name]
        if of_setting:
            held_out = between([float(row["held_out_loss"]) for row in of_setting], ".3f")
            step = f"{median(float(row['step_ms']) for row in of_setting):.1f}"
            cells = [label, str(len(of_setting)), step, held_out]
            for column, form in (("held_out_loss", "+.3f"), ("rare_loss", "+.3f"), ("rarest_loss", "+.2f")):
                exact = between([float(row[column]) for row in of_setting], form.replace("+", ""))
                cells.append(exact if name == EXACT else between(above_exact(runs, name, column), form))
            body.append([*cells[:4], "" if name == EXACT else cells[4], *cells[5:]])
    heading = ["", "runs", "step, ms", "held-out loss", "over exact", "rarest tenth", "rarest hundredth"]
    return markdown(heading, body)


STEPS = {
    "ours": "exact",
    "ours_sparse_10": "unbiased, $2^{-10}$",
    "ours_sparse_11": "unbiased, $2^{-11}$",
    "ours_sparse_12": "unbiased, $2^{-12}$",
    "torch_compile": "torch.compile",
    "cce": "Cut Cross-Entropy",
}


def sparse_steps(rows: Rows) -> str:
    """The time relative to three GEMMs; for trained models also the errors of dX and dW."""
    timed = {(row["prior"], shape_of(row), row["provider"]): row for row in rows if row["ms"]}
    problems = dict.fromkeys(key[:2] for key in timed if key[0] in ("trained", "flat"))
    heading = [""]
    for prior, shape in problems:
        loss = float(timed[prior, shape, "ours"]["loss"])
        _, of_head = shape.split("x", 1)
        heading += [f"{of_head}, loss {loss:.1f}", "dX, dW"] if prior == "trained" else [f"{of_head}, flat"]
    body = []
    for provider, name in STEPS.items():
        cells = []
        for prior, shape in problems:
            row = timed[prior, shape, provider]
            cells.append(f"{float(row['x_floor']):.2f}")
            if prior == "trained":
                cells.append(", ".join(error(row[column]) for column in ("err_dx", "err_dw")))
        body.append((name, *cells))
    return markdown(heading, body)


TABLES = {
    "training: losses": lambda: losses(finished("training")),
    "sparse.csv": lambda: sparse_steps(rows_of("sparse")),
}
