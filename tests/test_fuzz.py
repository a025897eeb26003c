"""The fuzzer (tests/fuzz) runs, passes what is right and finds what is wrong. Its campaigns are run by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import judge
from tests.fuzz.cases import Case, draw
from tests.fuzz.run import Ours

ROOT = Path(__file__).parent.parent
SEED, CASES = 1, 40


def test_a_sample_of_random_cases_is_as_near_to_the_truth_as_plain_torch():
    for index in range(CASES):
        case = draw(SEED, index, "cpu")
        if not case.mode.startswith("compile"):  # seconds each
            verdict = judge.examine(case, "cpu")
            assert not verdict.failures, f"python -m tests.fuzz --only {SEED}:{index}: {verdict.failures}"


FAULTS = {
    "a loss off by a millionth part": lambda found: found | {"loss": found["loss"] * (1.0 + 3e-6)},
    "a gradient counted twice": lambda found: found | {"loss": 2.0 * found["loss"] - found["loss"].detach()},
    "nan": lambda found: found | {"loss": found["loss"] * float("nan")},
    "another shape": lambda found: found | {"loss": found["loss"].unsqueeze(0)},
}


@pytest.mark.parametrize(
    "fault", ["a loss off by a millionth part", "a gradient counted twice", "nan", "another shape"]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_judge_sees_what_is_wrong(monkeypatch, fault, dtype):
    case = Case(dtype=dtype, tokens=(30,), D=8, V=40)
    assert not judge.examine(case, "cpu").failures
    call = Ours.__call__
    monkeypatch.setattr(Ours, "__call__", lambda self, case, at: FAULTS[fault](call(self, case, at)))
    assert judge.examine(case, "cpu").failures


def test_a_case_is_the_same_whenever_it_is_drawn():
    assert [draw(3, index, "cuda") for index in range(50)] == [draw(3, index, "cuda") for index in range(50)]
    half = [draw(3, index, "cuda") for index in range(400)]
    sizes = {(case.D, case.V) for case in half if case.dtype in ("bfloat16", "float16")}
    assert len(sizes) <= 24, "every size of half operands compiles kernels of its own"


def test_the_command_runs_the_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.fuzz", "--device", "interpreter", "--cases", "3", "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert "# 3 cases of seed" in done.stdout, done.stderr
