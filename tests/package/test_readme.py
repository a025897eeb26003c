"""README.md: its swap gives the same loss, the CSV has its figures. test_docs.py runs its code."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_swap_of_the_first_screen_gives_the_same_loss():
    swap, of_model = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert "+model = patch(AutoModelForCausalLM" in of_model
    losses = []
    for sign in "-+":
        names = {"F": F, "hidden": torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(1))}
        names |= {"weight": torch.randn(7, 5, generator=torch.Generator().manual_seed(2))}
        names |= {"target": torch.arange(18).view(2, 9) % 7}
        exec("\n".join(line[1:] for line in swap.splitlines() if line.startswith(sign)), names)
        losses.append(names["loss"])
    torch.testing.assert_close(*losses)


def test_the_readme_is_one_that_a_newcomer_reads_to_its_end():
    assert len(README.splitlines()) <= 150 and len(README.split()) <= 1000
