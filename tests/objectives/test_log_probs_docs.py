"""docs/log_probs.md: its code runs, its losses fall, and its error table is true.

To print its rows: PYTHONPATH=tests python tests/objectives/test_log_probs_docs.py
"""

# N tokens, D hidden, V vocabulary

import argparse
import re
from pathlib import Path

import inputs
import pytest
import torch
from reference_loss import error
from test_log_probs import FLOATS, cotangents_of, dense, ours, run

SHAPE = (400, 96, 1009)  # N, D, V
DRAWS = 8
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GRADIENTS = ("input", "linear_weight")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "log_probs.md"


def cells(dtype: torch.dtype, name: str, device: str, draws: int) -> list[str]:
    """Mean error of one result and of its own gradients: this package's / plain torch's."""
    sums = {key: [0.0, 0.0] for key in (name, *GRADIENTS)}
    for _ in range(draws):
        made = inputs.make_inputs(SHAPE, device=device, dtype=dtype)
        cotangents = cotangents_of([name], made)
        exact, _ = run(dense, made, cotangents, torch.float64)
        for column, function in enumerate((ours, dense)):
            found, _ = run(function, made, cotangents)
            for key in sums:
                sums[key][column] += error(found[key], exact[key]) / draws
    return [f"{mine:.1e} / {plain:.1e}" for mine, plain in sums.values()]


def documented_rows() -> dict[tuple[str, str], list[str]]:
    rows = (line.strip("| \n").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| "))
    return {(row[0], row[1].strip("`")): row[2:] for row in rows if row[0] in DTYPES}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_documented_errors_are_the_operators(dtype):
    documented = documented_rows()
    assert len(documented) == len(DTYPES) * len(FLOATS)
    for name in FLOATS:
        for found, written in zip(cells(DTYPES[dtype], name, "cpu", 1), documented[dtype, name], strict=True):
            mine, promised = (float(text.split(" / ")[0]) for text in (found, written))
            assert promised / 4 < mine < 4 * promised, (name, found, written)


def test_code_of_the_page_runs():
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        exec(block, names)
        for leaf in (names["hidden"], names["weight"]):
            assert leaf.grad is None or leaf.grad.isfinite().all()
    assert names["weight"].grad is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    inputs.seed_inputs(int.from_bytes(torch.randint(256, (4,), dtype=torch.uint8).numpy().tobytes(), "little"))
    for dtype in DTYPES:
        for name in FLOATS:
            print(f"| {dtype} | `{name}` | {' | '.join(cells(DTYPES[dtype], name, device, DRAWS))} |")


if __name__ == "__main__":
    main()
