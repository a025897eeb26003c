"""The fuzzer (tests/fuzz) runs, passes correct results and finds wrong ones. Long campaigns are run by hand."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.fuzz import judge
from tests.fuzz.cases import BUFFER_MODES, FUNCTIONS, Case
from tests.fuzz.consistent import consistent
from tests.fuzz.draw import draw
from tests.fuzz.ours import Ours

ROOT = Path(__file__).parents[2]
SEED, CASES = 1, 40


def test_a_sample_of_random_cases_is_as_near_to_the_truth_as_plain_torch():
    for index in range(CASES):
        case = draw(SEED, index, "cpu")
        if not case.mode.startswith("compile"):  # compiled cases take seconds each
            verdict = judge.examine(case, "cpu")
            assert not verdict.failures, f"python -m tests.fuzz --only {SEED}:{index}: {verdict.failures}"


def test_the_arguments_of_every_function_are_drawn():
    cases = [draw(SEED, index, "cpu") for index in range(3000)]
    for name in ("topk", "tail", "shift", "metrics", "dual_clip", "kl_factor", "on_policy", "frozen"):
        assert sum(bool(getattr(case, name)) for case in cases) > 10, name
    for name, values in DRAWN.items():
        assert {getattr(case, name) for case in cases} >= values, name
    caps = [case.softcap for case in cases if case.softcap is not None]
    assert min(caps) < 0.01 and max(caps) > 1e5
    assert {case.sparse for case in cases if case.class_order} == {"", "drop", "unbiased"}
    assert {(case.learnt, case.poison) for case in cases} >= set(
        product(("logit_scale", "temperature"), ("nan", "inf"))
    )
    assert {case.mode for case in cases if case.main_grad} == set(BUFFER_MODES)
    for function in FUNCTIONS:
        modes = {case.mode for case in cases if case.function == function}
        assert len(modes) > 10, function


DRAWN = {
    "sparse": {"", "drop", "unbiased"},
    "main_grad": {"", "own", "sums"},
    "objective": {"ppo", "cispo"},
    "kl_estimator": {"k1", "k2", "k3"},
}

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


NEWER = {
    "soft targets": {"topk": 5},
    "a tail": {"function": "log_probs", "reduction": "none", "topk": 3, "tail": True},
    "metrics": {"function": "metrics", "metrics": ("entropy", "is_top1", "argmax", "token_accuracy")},
    "labels": {"shift": True},
    "a policy": {"function": "policy", "kl_factor": 0.5, "dual_clip": 3.0},
    "a pair": {"function": "low_rank", "rank": 3, "frozen": True, "wants": ("input", "pair_input", "pair_weight")},
    "lists": {"sparse": "unbiased", "threshold": 2.0**-5},
    "a buffer": {"main_grad": "sums", "mode": "backward"},
    "two micro-batches": {"main_grad": "sums", "mode": "two_forwards"},
    "a buffer that is zeroed": {"main_grad": "sums", "mode": "zeroed"},
    "an order": {"sparse": "unbiased", "threshold": 2.0**-5, "class_order": True},
    "a learnt scale": {"learnt": "logit_scale", "logit_scale": 2.0},
    "a learnt temperature": {"learnt": "temperature", "temperature": 0.7},
}
BLIND = {  # fields of a case that this package gets differently than the reference, to see that the fuzzer notices
    "soft targets": lambda at: {"target_weight": at["target_weight"] * 1.001},
    "a tail": lambda at: {"target": at["target"].roll(1, -2)},
    "metrics": lambda at: {"target": at["target"].roll(1, 0)},
    "labels": lambda at: {"target": at["target"].roll(-1, 0)},
    "a policy": lambda at: {"old_log_probs": at["old_log_probs"] + 0.01},
    "a pair": lambda at: {"pair_input": at["pair_input"] * 1.001},
    "lists": lambda at: {"gradient_seed": at["gradient_seed"] + 1},
    "a buffer": lambda at: {"main_grad": at["main_grad"].clone()},
    "two micro-batches": lambda at: {"main_grad": at["main_grad"].clone()},
    "a buffer that is zeroed": lambda at: {"main_grad": at["main_grad"].clone()},
    "an order": lambda at: {"class_order": at["class_order"].flip(0)},
    "a learnt scale": lambda at: {"learnt": at["learnt"].detach()},
    "a learnt temperature": lambda at: {"learnt": at["learnt"].detach()},
}


@pytest.mark.parametrize("name", NEWER)
def test_the_judge_knows_what_every_argument_means(monkeypatch, name):
    case = consistent(Case(dtype="float64", tokens=(30,), D=8, V=40, data="randn", **NEWER[name]))
    assert not judge.examine(case, "cpu").failures
    call = Ours.__call__
    monkeypatch.setattr(Ours, "__call__", lambda self, case, at: call(self, case, {**at, **BLIND[name](at)}))
    assert judge.examine(case, "cpu").failures


def test_a_case_is_the_same_whenever_it_is_drawn():
    assert [draw(3, index, "cuda") for index in range(50)] == [draw(3, index, "cuda") for index in range(50)]
    half = [draw(3, index, "cuda") for index in range(400)]
    sizes = {(case.D, case.V) for case in half if case.dtype in ("bfloat16", "float16")}
    assert len(sizes) <= 24, "every size of half operands compiles kernels of its own"


def test_the_command_runs_the_triton_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.fuzz", "--device", "interpreter", "--cases", "3", "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert "# 3 cases of seed" in done.stdout, done.stderr
