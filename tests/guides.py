"""Runs the code of the guides. Those that continue docs/quickstart.md use its names."""

import importlib.util
import re
from pathlib import Path

from flce_ops.support import workspace as budgets

ROOT = Path(__file__).resolve().parents[1]
CONTINUE_TRAIN = ("transformers", "log_probs", "policy_loss", "token_losses", "distillation")


def python_of(page: str) -> list[str]:
    """The blocks of a page, README or docs/..., that run; ```py blocks are fragments."""
    return re.findall(r"^```python\n(.*?)```", (ROOT / f"{page}.md").read_text(), re.DOTALL | re.MULTILINE)


def program_of(page: str) -> list[str]:
    """The blocks of a page, after those of the page that it continues."""
    continues = page.removeprefix("docs/") in CONTINUE_TRAIN
    return [*(python_of("docs/quickstart") if continues else ()), *python_of(page)]


def names_after(page: str) -> dict[str, object]:
    """Runs the code of a page, and gives the names that it defines."""
    assert python_of(page)
    names: dict[str, object] = {}
    try:
        for block in program_of(page):
            if "transformers" not in block or importlib.util.find_spec("transformers"):  # CI installs it
                exec(block, names)
    finally:
        budgets.temporary.set(budgets.AUTO)
        budgets._retained.set(None)
    return names
