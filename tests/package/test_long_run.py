"""Many steps in one process (tests/long_run.py): memory and caches do not grow, and where they do it is told."""

import subprocess
import sys

import long_run
import pytest
import torch
from fresh_process import ROOT

import flce_ops.support.path


def run(*arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.long_run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


def test_steps_of_changing_numbers_of_tokens_leave_nothing():
    run("--steps", "450", "--eager")


@pytest.mark.exhaustive
def test_thousands_of_steps_some_of_them_compiled_leave_nothing():
    run("--steps", "3000")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ten_thousand_steps_on_a_gpu_leave_nothing():
    run("--steps", "10000", "--device", "cuda")


def test_a_tensor_kept_by_each_step_and_a_cache_that_grows_are_told(monkeypatch):
    kept = []

    def leaking(step):
        kept.append(step.hidden)
        flce_ops.support.path._logged.add((str(len(kept)), "", ""))
        return long_run.loss(step)

    logged = set(flce_ops.support.path._logged)
    monkeypatch.setattr(flce_ops.support.path, "_logged", logged)
    monkeypatch.setattr(long_run, "CALLS", [leaking])
    told = " ".join(long_run.grown(long_run.run(30, "cpu", compiled=False), "cpu"))
    assert "tensors" in told and "entries of caches" in told
