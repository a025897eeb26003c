"""The README's Python blocks, run in order as one program."""

import importlib.util
import inspect
import re
from pathlib import Path

import torch

import flce_ops

README = Path(__file__).parents[1] / "README.md"


def test_code_of_the_readme_runs_and_gives_the_same_loss():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    before, after, *others = blocks
    names: dict[str, object] = {}
    exec(before, names)
    plain = names["loss"]
    exec(after, names)
    torch.testing.assert_close(names["loss"], plain)
    workspace = flce_ops.get_workspace()
    try:
        for block in others:
            if "transformers" in block and importlib.util.find_spec("transformers") is None:
                continue  # an extra; CI has it
            exec(block, names)
    finally:
        flce_ops.set_workspace(workspace)


def test_arguments_table_of_the_readme_has_every_argument():
    names = set(inspect.signature(flce_ops.linear_cross_entropy).parameters)
    table = README.read_text().split("## Arguments")[1].split("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert names == listed
