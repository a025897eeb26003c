"""`python -m flce_ops.check` passes a correct installation and reports what is wrong."""

import pytest
import torch

import flce_ops
from flce_ops import check


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(check, "SHAPES", {"cpu": (20, 8, 67), "cuda": (100, 72, 1031)})
    monkeypatch.setattr(check, "TIMED", (1000, 256, 32003))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_exact_is_as_promised(device, capsys, monkeypatch):
    monkeypatch.setattr(check, "step", lambda head: [])  # the step takes seconds
    assert check.main(["--device", device]) == 0
    shown = capsys.readouterr().out
    assert f"flce_ops {flce_ops.__version__} on {device}" in shown and f"PyTorch version: {torch.__version__}" in shown
    assert shown.count("| yes |") == 4 * len(check.DTYPES) and shown.endswith("all as promised\n")


def test_a_gradient_that_is_off_by_a_thousandth_is_told(capsys, monkeypatch):
    exact = flce_ops.linear_cross_entropy
    monkeypatch.setattr(check, "linear_cross_entropy", lambda *operands: Off.apply(exact(*operands)))
    assert check.main(["--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "| loss, gradients, error in float32 | 1.0e-03 |" in shown and "**NO**" in shown
    assert "lines are worse than promised" in shown


class Off(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.001 * gradient


@pytest.mark.parametrize("milliseconds, promised", [(2.0, True), (4.0, False)])
def test_a_step_slower_than_the_eager_one_is_told_and_one_slower_than_the_compiled_is_not(
    milliseconds, promised, monkeypatch
):
    measured = iter([(milliseconds, 1), (3.0, 2), (1.0, 2)])  # flce_ops, eager, torch.compile
    monkeypatch.setattr(check, "time_and_memory", lambda function, head: next(measured))
    head = check.make_head(check.SHAPES["cpu"], torch.device("cpu")).to(torch.float32)
    times = [line.promised for line in check.step(head) if line.what.startswith("step of")]
    assert times == [promised, True]


@pytest.mark.parametrize("failing, told", [("eager", True), ("torch.compile", True), ("flce_ops", False)])
def test_only_an_error_of_plain_torch_is_told_and_passed_over(failing, told, capsys, monkeypatch):
    """Its logits may not fit the memory. An error of the package ends the check."""
    names = iter(["flce_ops", "eager", "torch.compile"])

    def measured(function, head):
        if next(names) == failing:
            raise RuntimeError("no room")
        return 1.0, 2

    monkeypatch.setattr(check, "time_and_memory", measured)
    head = check.make_head(check.SHAPES["cpu"], torch.device("cpu")).to(torch.float32)
    if told:
        assert not any(failing in line.what for line in check.step(head))
        assert f"{failing}: RuntimeError: no room" in capsys.readouterr().out
    else:
        with pytest.raises(RuntimeError, match="no room"):
            check.step(head)


@pytest.mark.gpu
def test_a_step_is_measured(capsys):
    head = check.make_head(check.TIMED, torch.device("cuda")).to(torch.bfloat16)
    lines = check.step(head)
    assert [line.what for line in lines][-1] == "workspace" and lines[-1].promised
    assert {line.path for line in lines} <= {"triton", "aten"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told_without_a_traceback(capsys):
    for name, hint in (("cuda", "sees no GPU here; install a CUDA build"), ("gpu", "Expected one of cpu, cuda")):
        with pytest.raises(SystemExit) as stopped:
            check.main(["--device", name])
        assert stopped.value.code == 2 and f"error: --device {name}: " in (said := capsys.readouterr().err)
        assert hint in said
