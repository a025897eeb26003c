"""README.md: its swap gives the same loss, the CSV has its figures. test_docs.py runs its code."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flce_ops

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_swap_of_the_first_screen_gives_the_same_loss():
    (swap,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    losses = []
    for sign in "-+":
        names = {"F": F, "hidden": torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(1))}
        names |= {"weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(2))}
        names |= {"target": torch.arange(18).view(2, 9) % 7}
        exec("\n".join(line[1:] for line in swap.splitlines() if line.startswith(sign)), names)
        losses.append(names["loss"])
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    "function",
    [
        flce_ops.linear_cross_entropy,
        flce_ops.linear_log_probs,
        flce_ops.linear_policy_loss,
        flce_ops.linear_kl_div,
        flce_ops.cross_entropy,
    ],
    ids=lambda function: function.__name__,
)
def test_the_docstring_of_a_public_function_has_every_argument(function):
    """The API page is made from these docstrings."""
    arguments = inspect.getdoc(function).split("Args:\n")[1].split("\n\nReturns:")[0]
    listed = re.findall(r"^    (\w+(?:, \w+)*):", arguments, re.MULTILINE)
    names = [name for line in listed for name in line.split(", ")]
    assert sorted(names) == sorted(inspect.signature(function).parameters)
