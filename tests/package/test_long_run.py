"""Many steps in one process (tests/long_run.py): memory and caches do not grow."""

import subprocess
import sys

import pytest
import torch
from fresh_process import ROOT

DEVICES = [
    "--steps 450 --eager",
    pytest.param(
        "--steps 10000 --device cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", DEVICES)
def test_steps_of_changing_numbers_of_tokens_leave_nothing(options):
    command = [sys.executable, "-W", "ignore", "-m", "tests.long_run", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
