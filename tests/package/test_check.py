"""`python -m flce_ops.check` passes a correct installation and reports what is wrong."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fresh_process import run_fresh

import flce_ops
from flce_ops import check


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(check, "SHAPES", {"cpu": (20, 8, 67), "cuda": (100, 72, 1031)})
    monkeypatch.setattr(check, "TIMED", (1000, 256, 32003))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_exact_is_as_promised(device, capsys, monkeypatch):
    monkeypatch.setattr(check, "step", lambda head, progress: [])  # the step takes seconds
    assert check.main(["--device", device]) == 0
    shown = capsys.readouterr().out
    assert f"flce_ops {flce_ops.__version__} on {device}" in shown and f"PyTorch version: {torch.__version__}" in shown
    assert shown.count("| yes |") == 4 * len(check.DTYPES)
    assert re.search(r"\n\nall as promised, in \d+ s\n$", shown)


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


def test_progress_goes_to_stderr_and_names_every_case(capsys):
    """The block on stdout is for an issue."""
    check.main(["--device", "cpu"])
    printed = capsys.readouterr()
    told = re.findall(r"^\[ *\d+\.\d s\] (.*)$", printed.err, re.MULTILINE)
    assert len(told) == 1 + len(check.CASES) * len(check.DTYPES) and not any(line in printed.out for line in told)


@pytest.fixture
def head():
    torch.manual_seed(1)
    return check.make_head(check.SHAPES["cpu"], torch.device("cpu")).to(torch.bfloat16)


def test_the_exact_loss_is_that_of_all_logits_in_float64(head):
    expected = check.derived(check.plain_loss, head.to(torch.float64))
    for found, exact in zip(check.exact_loss(head, rows=7), expected):
        torch.testing.assert_close(found, exact)


def test_a_step_has_errors_and_time_beside_eager_and_compiled_torch(head, monkeypatch):
    """A CPU's compiler takes seconds: the compiled function is the eager one here."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    told = []
    assert_a_step_is_as_promised(check.step(head, told.append), told, [], "aten")


def assert_a_step_is_as_promised(lines, told, units, path):
    """`units` are those of the lines after the errors and the time."""
    value, gradients, time, *others = lines
    assert len(told) == 4 and len(others) == len(units) and value.path == path
    for line in (value, gradients):
        assert line.promised and all(float(cell) < 1e-2 for cell in line.numbers), line
    assert all(cell.endswith(" ms") and float(cell[:-3]) > 0 for cell in time.numbers), time
    for line, unit in zip(others, units):
        assert line.promised and all(cell.endswith(unit) for cell in line.numbers), line


# more logits than the workspace holds, or torch.compile would need as little memory
STEP_ON_A_GPU = """
import json, torch
from flce_ops import check

head, told = check.make_head((4096, 64, 128256), torch.device("cuda")).to(torch.bfloat16), []
print(json.dumps([check.step(head, told.append), told]))
"""


@pytest.mark.gpu
def test_a_step_on_a_gpu_has_less_memory_than_eager_and_compiled_torch_too():
    """In a process of its own, as the command is, so that nothing of other tests is counted."""
    lines, told = json.loads(run_fresh(STEP_ON_A_GPU).splitlines()[-1])
    assert_a_step_is_as_promised([check.Line(*line) for line in lines], told, [" MiB"], "triton")


def measured(milliseconds, mib, head):
    return check.Measured(check.exact_loss(head), milliseconds, mib)


@pytest.mark.parametrize(
    "milliseconds, mib, promised",
    [(2.0, 1.0, [True, True]), (4.0, 1.0, [False, True]), (2.0, 4.0, [True, False]), (2.0, 1e4, [True, False])],
)
def test_a_step_slower_or_larger_than_promised_is_told_and_one_slower_than_the_compiled_is_not(
    milliseconds, mib, promised, head, monkeypatch
):
    each = iter([(milliseconds, mib), (3.0, 5.0), (1.0, 3.0)])  # flce_ops, eager, torch.compile
    monkeypatch.setattr(check, "time_and_memory", lambda function, head: measured(*next(each), head))
    lines = check.step(head, lambda what: None)
    assert [line.promised for line in lines] == [True, True, *promised]


@pytest.mark.parametrize("failing, told", [("eager", True), ("torch.compile", True), ("flce_ops", False)])
def test_only_an_error_of_plain_torch_is_told_and_passed_over(failing, told, head, capsys, monkeypatch):
    """Its logits may not fit the memory. An error of the package ends the check."""
    names = iter(["flce_ops", "eager", "torch.compile"])

    def fails(function, head):
        if next(names) == failing:
            raise RuntimeError("no room")
        return measured(1.0, 2.0, head)

    monkeypatch.setattr(check, "time_and_memory", fails)
    if told:
        for line in check.step(head, lambda what: None):
            assert [cell == "" for cell in line.numbers] == [False, failing == "eager", failing == "torch.compile"]
        assert f"{failing}: RuntimeError: no room" in capsys.readouterr().out
    else:
        with pytest.raises(RuntimeError, match="no room"):
            check.step(head, lambda what: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_told_without_a_traceback(capsys):
    for name, hint in (("cuda", "sees no GPU here; install a CUDA build"), ("gpu", "Expected one of cpu, cuda")):
        with pytest.raises(SystemExit) as stopped:
            check.main(["--device", name])
        assert stopped.value.code == 2 and f"error: --device {name}: " in (said := capsys.readouterr().err)
        assert hint in said


def test_the_commands_of_the_package_are_listed_and_exist():
    done = subprocess.run([sys.executable, "-m", "flce_ops"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = re.findall(r"^  python -m ([\w.]+)  +\S", done.stdout, re.MULTILINE)
    assert all(importlib.util.find_spec(name) for name in commands)
    runnable = [path.stem for path in Path(flce_ops.__file__).parent.glob("*.py") if "argparse" in path.read_text()]
    assert sorted(commands[:2]) == sorted(f"flce_ops.{name}" for name in runnable) and len(commands) == 4


def test_a_bug_report_asks_for_what_the_check_prints():
    form = (Path(__file__).resolve().parents[2] / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
    asked = form.split("id: check\n")[1].split("- type:")[0]
    assert "`python -m flce_ops.check`" in asked and "required: true" in asked
