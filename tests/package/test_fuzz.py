"""The fuzzer (tests/fuzz) runs, passes what is right and finds what is wrong; a sample of its cases."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist
from inputs import current_seed

from tests.fuzz import judge, ours
from tests.fuzz.cases import BUFFER_MODES, FUNCTIONS, MESHES, Case
from tests.fuzz.consistent import consistent
from tests.fuzz.draw import draw
from tests.fuzz.ours import Ours

pytest.importorskip("hypothesis")

from tests.fuzz.properties import hold

ROOT = Path(__file__).parents[2]
SEED, CASES = 1, 40


@pytest.fixture(autouse=True)
def no_process_group_stays():
    """A case on a mesh makes one."""
    yield
    if dist.is_initialized():
        ours.mesh.cache_clear()
        dist.destroy_process_group()


def test_a_sample_of_random_cases_is_as_near_to_the_truth_as_plain_torch():
    for index in range(CASES):
        case = draw(SEED, index, "cpu")
        if not case.mode.startswith("compile"):  # compiled cases take seconds each
            verdict = judge.examine(case, "cpu")
            assert not verdict.failures, f"python -m tests.fuzz --only {SEED}:{index}: {verdict.failures}"


def test_cases_of_hypothesis_are_as_near_to_the_truth_as_plain_torch():
    hold("cpu", 100, current_seed(), compiled=False)


def command(*arguments: str) -> subprocess.CompletedProcess:
    whole = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=1800)


@pytest.mark.exhaustive
@pytest.mark.parametrize("device, cases", [("cpu", 2000), ("interpreter", 300)])
@pytest.mark.parametrize("drawn_by", ["number", "hypothesis"])
def test_thousands_of_cases_are_as_near_to_the_truth_as_plain_torch(device, cases, drawn_by):
    if device == "interpreter":
        pytest.importorskip("triton")
    half = str(cases // 2)
    hypothesis = ["--hypothesis"] if drawn_by == "hypothesis" else []
    done = command("--device", device, "--cases", half, "--seed", str(current_seed()), *hypothesis)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_hypothesis_shrinks_a_failure_to_the_plainest_case_like_it(monkeypatch, capsys):
    """A fault under every softcap: what is left of a case is the softcap."""
    call = Ours.__call__

    def wrong(self, case, at):
        found = call(self, case, at)
        return found if case.softcap is None or "loss" not in found else found | {"loss": 1.1 * found["loss"]}

    monkeypatch.setattr(Ours, "__call__", wrong)
    with pytest.raises(AssertionError, match="softcap") as failure:
        hold("cpu", 300, 1, compiled=False)
    assert len(str(failure.value).split("Case(")[1].split("):")[0].split(", ")) < 16, failure.value


def test_the_cases_are_on_every_axis():
    cases = [draw(SEED, index, "cpu") for index in range(3000)]
    assert {case.mesh for case in cases} == set(MESHES)
    on_mesh = {case.function for case in cases if case.mesh}
    assert on_mesh == {"cross_entropy", "metrics", "log_probs", "kl_div", "given_logits", "policy"}


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
    done = command("--device", "interpreter", "--cases", "3", "--seed", str(SEED))
    assert "# 3 cases of seed" in done.stdout, done.stderr
