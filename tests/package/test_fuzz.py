"""The fuzzer (tests/fuzz) passes what is right and finds what is wrong. `make nightly` runs thousands of cases."""

import pytest
import torch.distributed as dist

from tests.fuzz import judge, ours
from tests.fuzz.cases import Case
from tests.fuzz.draw import draw
from tests.fuzz.ours import Ours


@pytest.fixture(autouse=True)
def no_process_group_stays():
    """A case on a mesh makes one."""
    yield
    if dist.is_initialized():
        ours.mesh.cache_clear()
        dist.destroy_process_group()


def test_a_sample_of_random_cases_is_as_near_to_the_truth_as_plain_torch():
    for index in range(60):
        case = draw(1, index, "cpu")
        if not case.mode.startswith("compile"):  # compiled cases take seconds each
            verdict = judge.examine(case, "cpu")
            assert not verdict.failures, f"python -m tests.fuzz --only 1:{index}: {verdict.failures}"


@pytest.mark.parametrize("factor", [1.0 + 3e-6, float("nan")])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_loss_off_by_a_millionth_part_is_found(monkeypatch, factor, dtype):
    case = Case(dtype=dtype, tokens=(30,), D=8, V=40)
    assert not judge.examine(case, "cpu").failures
    call = Ours.__call__

    def wrong(self, case, at):
        found = call(self, case, at)
        return found | {"loss": factor * found["loss"]}

    monkeypatch.setattr(Ours, "__call__", wrong)
    assert judge.examine(case, "cpu").failures
