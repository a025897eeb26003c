"""The table of steps with a sparse gradient, on trained models' hidden states and a flat prior (sparse.csv)."""

from __future__ import annotations

from .markdown import Rows, error, markdown, rows_of, shape_of

STEPS = {
    "ours": "exact",
    "ours_sparse_10": "unbiased, $2^{-10}$",
    "ours_sparse_11": "unbiased, $2^{-11}$",
    "ours_sparse_12": "unbiased, $2^{-12}$",
    "torch_compile": "torch.compile",
    "cce": "Cut Cross-Entropy",
}


def table(rows: Rows) -> str:
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
    return f"Commit {rows[0]['commit']}, 8192 tokens.\n\n{markdown(heading, body)}"


TABLES = {"sparse.csv": lambda: table(rows_of("sparse"))}
