"""The kernels compile for GPUs that are not here, from Ampere to both Blackwells, and for two of AMD's."""

import os
import subprocess
import sys

import pytest
import torch
from fresh_process import ROOT

pytest.importorskip("triton")


def compiled_by(folder, module: str, *arguments: str) -> str:
    # in its own process, because the suite's interpreter mode would replace the compiler; with its own cache, so that
    # nothing is stale
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", f"benchmarks.kernels.{module}", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Every kernel for one card of each kind of tiles; the others have the same kernels with another limit.
CARDS = ["80", "90", "100", "120", "gfx942"]
LIKE_THEM = ["86", "89", "103", "121", "gfx950"]
SOME_CALLS = ["--calls", "loss", "sparse", "given logits"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("card", CARDS + LIKE_THEM)
def test_every_kernel_compiles_for_the_card_and_fits_its_shared_memory(card, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled ahead for the GPU that is there alone")
    said = compiled_by(tmp_path, "compile_cards", "--cards", card, *(SOME_CALLS if card in LIKE_THEM else []))
    assert f"{card}: " in said


@pytest.mark.exhaustive
def test_kernels_without_a_product_compile_for_a_card_of_each_limit(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled ahead for the GPU that is there alone")
    cards = ["80", "100", "120"]
    said = compiled_by(tmp_path, "compile_cards", "--cards", *cards, "--calls", "given logits")
    assert [line.split(":")[0] for line in said.splitlines()] == cards


def test_what_does_not_fit_a_card_is_told():
    from benchmarks.kernels.compile_cards import CARDS, Compiled, faults

    limit, _ = CARDS["86"]
    gemm = Compiled("logits_gemm_kernel", limit, 0, tcgen05=False)
    assert not faults("86", gemm) and not faults("100", gemm._replace(tcgen05=True))
    assert faults("86", gemm._replace(shared=limit + 1)) == [
        f"{limit + 1} bytes of shared memory, the card has {limit}"
    ]
    assert "stack" in faults("90", gemm._replace(stack=4096))[0]
    assert faults("103", gemm) == ["no tcgen05.mma"]


@pytest.mark.exhaustive
def test_the_gemms_compile_ahead_for_every_architecture(tmp_path):
    said = compiled_by(tmp_path, "compile_targets")
    compiled = {tuple(line.replace(",", "").split()[:2]) for line in said.splitlines()}
    architectures = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
    assert compiled == {(name, gemm) for name in architectures for gemm in ("logits", "weight", "input")}
