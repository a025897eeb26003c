"""The GEMMs compile for GPUs that are not here: Ampere, Ada, Hopper, both Blackwells."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_the_gemms_compile_ahead_for_every_architecture(tmp_path):
    # in its own process, because the suite's interpreter mode would replace the compiler; with its own cache, so that
    # nothing is stale
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.kernels.compile_targets"]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {tuple(line.replace(",", "").split()[:2]) for line in done.stdout.splitlines()}
    architectures = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
    assert compiled == {(name, gemm) for name in architectures for gemm in ("logits", "weight", "input")}
