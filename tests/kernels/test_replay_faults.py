"""Memory that runs out or an interrupt while launches are captured, prepared or repeated: the next call is right."""

import pytest
import torch
from test_replay import driver, driver_launch, launch_graphs, replay  # noqa: F401  a fixture, and what it stands for

REPEATS = 8  # the step as it is written, captured, launched, as a graph


def step_of(device):
    def step(x, y):
        for _ in range(2):
            part = x.new_empty(1000)
            device.launch(1, x, part)
            device.launch(2, part, y)

    return step


class Failing:
    """The driver, of which call number `at` raises once it is done, as an interrupt is noticed."""

    def __init__(self, device, at: int) -> None:
        self.device, self.at, self.count = device, at, 0

    def __getattr__(self, name):
        function = getattr(self.device, name)
        if not name.startswith("cu"):
            return function

        def call(*args):
            result = function(*args)
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
            return result

        return call


def run(step, x, y) -> list[int]:
    replay.repeated(step, x, y)
    return [x.data_ptr(), y.data_ptr()]


def assert_as_ever(driver, step) -> None:  # noqa: F811
    """No lock is taken, no stream captures, and from some call on the launches are repeated at the calls' addresses."""
    assert not driver_launch.Capture._one_at_a_time.locked() and not launch_graphs._lock.locked()
    assert not driver.capturing
    for _ in range(3):
        x, y = torch.zeros(4), torch.zeros(6)
        driver.launched.clear()
        replay.repeated(step, x, y)
        assert [one.values[0] for one in driver.launched[::2]] == [x.data_ptr()] * 2
        assert [one.values[1] for one in driver.launched[1::2]] == [y.data_ptr()] * 2


def test_an_interrupt_at_any_call_of_the_driver_leaves_no_lock_and_no_capture(driver, monkeypatch):  # noqa: F811
    at = 1
    while True:
        monkeypatch.setattr(replay, "_known", {})
        step, failing = step_of(driver), Failing(driver, at)
        same = torch.zeros(4), torch.zeros(6)  # whose addresses come again: a graph
        interrupted = False
        with monkeypatch.context() as patched:
            for module in (driver_launch, launch_graphs, replay):
                patched.setattr(module, "driver", lambda failing=failing: failing)
            try:
                for _ in range(REPEATS):
                    replay.repeated(step, *same)
            except KeyboardInterrupt:
                interrupted = True
        if not interrupted:
            break
        assert_as_ever(driver, step)
        at += 1
    assert at > 20


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_step_whose_memory_ran_out_is_captured_by_the_next_call(driver, call, monkeypatch):  # noqa: F811
    """It is not taken for one that cannot be repeated."""
    step, x, y = step_of(driver), torch.zeros(4), torch.zeros(6)
    for _ in range(call - 1):
        replay.repeated(step, x, y)
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left, says the test")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", no_memory)
        patched.setattr(torch.Tensor, "new_empty", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="says the test"):
            replay.repeated(step, x, y)
    assert torch.empty is empty and torch.Tensor.new_empty is new_empty
    assert_as_ever(driver, step)
    (known,) = replay._known.values()
    assert isinstance(known, replay.Replay)
