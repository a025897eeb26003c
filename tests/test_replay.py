"""Launches that are written down once and repeated: the same bits, in memory that is used by nothing else."""

import inspect
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import flce_ops

replay = pytest.importorskip("flce_ops.triton.replay")
driver_launch = pytest.importorskip("flce_ops.triton.driver_launch")


class Launcher:
    """As Triton's: called with what a compiled kernel is launched with."""

    num_ctas = 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *arguments):
        self.launch(x, y, z, stream, function, *arguments)


class LaunchesWithoutDriver:
    """In place of DriverLaunches: the launcher itself, with the addresses that are in the Places."""

    def __init__(self, written, places, device):
        assert len(set(places)) == len(places)
        self.written, self.launches = written, []

    def run(self, stream):
        for compiled, grid, arguments in self.written:
            compiled.run(*grid, stream, compiled.function, None, None, None, None, *arguments)


class Spy:
    """A kernel whose launches say what addresses they were given."""

    arg_names = ("a", "b", "c")
    signature = inspect.signature(lambda a, b, c=7: None)
    function, packed_metadata = "function", None

    def __init__(self):
        self.seen = []
        self.run = Launcher(self.launch)

    def launch(self, x, y, z, stream, function, *arguments):
        assert function == self.function
        found = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in arguments]
        self.seen.append(((x, y, z), found, stream))

    def __getitem__(self, grid):
        def run(*args, **options):
            self.launch(*(*grid, 1, 1)[:3], None, self.function, *args, *options.values())
            return self

        return run


def launches_without_driver(written, places, device):
    return LaunchesWithoutDriver(written, places, device) if all(map(driver_launch.is_plain, written)) else None


@pytest.fixture
def on_any_device(monkeypatch):
    monkeypatch.setattr(replay, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(replay, "current_stream", lambda device: 5)
    monkeypatch.setattr(replay, "driver_launches", launches_without_driver)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(replay, "_known", {})


@pytest.fixture
def spy():
    return Spy()


def launches_of(spy, step, *arguments):
    spy.seen.clear()
    replay.repeated(step, *arguments)
    return list(spy.seen)


def test_the_third_call_launches_what_was_written_down_at_its_own_addresses(on_any_device, spy):
    kernel, calls = replay.Kernel(spy), []

    def step(x, pair):
        calls.append(1)
        kernel[(3,)](x[1:], pair[0], c=4)
        kernel[(3, 2)](pair[1].view(-1), 9)
        return "result"

    for expected_calls in (1, 2, 2, 2):
        x, y = torch.zeros(4), torch.zeros(2, 3)
        seen = launches_of(spy, step, x, (y, y.new_zeros(6)))
        assert len(calls) == expected_calls
        assert [addresses[0] for _, addresses, _ in seen][0] == x.data_ptr() + 4
        assert seen[0][1][1] == y.data_ptr()
    assert [(grid, stream) for grid, _, stream in seen] == [((3, 1, 1), 5), ((3, 2, 1), 5)]
    assert seen[0][1][2] == 4 and seen[1][1][1:] == [9, 7]
    assert replay.repeated(step, x, (y, y.new_zeros(6))) == "result"


def test_calls_with_more_results_of_their_own_are_another_kind(on_any_device, spy):
    """An operator's results, and those of one like it that writes to an argument in place of the last."""
    kernel = replay.Kernel(spy)

    def step(x, *results):
        kernel[(1,)](results[-1] if len(results) > 1 else x, 0)

    x = torch.zeros(4)
    for _ in range(4):
        loss, grad = torch.zeros(1), torch.zeros(4)
        for results, written in (((loss, grad), grad), ((loss,), x)):
            spy.seen.clear()
            replay.repeated(step, x, fresh=results)
            ((_, (address, *_), _),) = spy.seen
            assert address == written.data_ptr()
    assert [type(known) for known in replay._known.values()] == [replay.Replay] * 2


def test_memory_in_use_together_is_apart_and_other_memory_is_shared(on_any_device, spy):
    kernel = replay.Kernel(spy)

    def step(x):
        first, second = x.new_empty(1000), x.new_empty(3000)
        kernel[(1,)](x, first)
        kernel[(1,)](first, second)
        kernel[(1,)](second, x.new_empty(900))

    x = torch.zeros(4)
    for _ in range(3):
        seen = launches_of(spy, step, x)
    (known,) = replay._known.values()
    (_, (_, first, _), _), (_, (_, second, _), _), (_, (_, third, _), _) = seen
    assert {abs(first - second) >= 4000, abs(second - third) >= 3600} == {True}
    assert first == third and sum(known.blocks) < 4 * (1000 + 3000 + 900)


def test_large_memory_is_allocated_in_the_sizes_of_the_step(on_any_device, spy):
    kernel, number = replay.Kernel(spy), replay.LARGE // 4

    def step(x):
        first = x.new_empty(3 * number)
        kernel[(1,)](x, first)
        for size in (number, 2 * number, 100):  # one after another
            kernel[(1,)](first, x.new_empty(size))

    for _ in range(3):
        replay.repeated(step, torch.zeros(4))
    (known,) = replay._known.values()
    assert known.blocks == [12 * number, 8 * number, 400]


def other_work(kernel, x):
    kernel[(1,)](x + 1, x)


def host_read(kernel, x):
    kernel[(1,)](x, int(x[0]))


@pytest.mark.parametrize("step", [other_work, host_read])
def test_a_step_that_does_more_than_launch_is_run_as_it_is_written(on_any_device, spy, step):
    kernel, x = replay.Kernel(spy), torch.zeros(4)
    calls = []

    def counted(x):
        calls.append(1)
        step(kernel, x)

    for _ in range(4):
        replay.repeated(counted, x)
    assert len(calls) == 4 and list(replay._known.values()) == [replay.NOT_REPEATABLE]


@pytest.mark.parametrize("change", ["no launcher as we know it", "scratch memory", "clusters", "many launches"])
def test_what_cannot_be_prepared_is_run_as_it_is_written(on_any_device, spy, monkeypatch, change):
    kernel, x, calls = replay.Kernel(spy), torch.zeros(4), []
    if change == "no launcher as we know it":
        spy.run = None
    if change == "scratch memory":
        spy.run.global_scratch_size = 128
    if change == "clusters":
        spy.run.num_ctas = 2
    if change == "many launches":
        monkeypatch.setattr(replay, "LAUNCHES_AT_MOST", 1)

    def step(x):
        calls.append(1)
        kernel[(1,)](x, 1)
        kernel[(1,)](x, 2)

    for _ in range(4):
        assert len(launches_of(spy, step, x)) == 2
    assert len(calls) == 4 and list(replay._known.values()) == [replay.NOT_REPEATABLE]


def test_arguments_that_share_memory_are_not_repeated(on_any_device, spy):
    kernel, both = replay.Kernel(spy), torch.zeros(8)

    def step(x, y):
        kernel[(1,)](x, y)

    for _ in range(3):
        replay.repeated(step, both[:5], both[3:])
    assert list(replay._known.values()) == [replay.NOT_REPEATABLE]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x.double(), 1),
        lambda x: (torch.zeros(7, 4).T, 1),
        lambda x: (torch.zeros(29)[1:].view(4, 7), 1),  # another alignment
        lambda x: (x, 2),
        lambda x: (torch.zeros(4, 8), 1),
    ],
)
def test_another_kind_of_call_is_written_down_for_itself(on_any_device, spy, other):
    kernel, x = replay.Kernel(spy), torch.zeros(4, 7)

    def step(x, number):
        kernel[(1,)](x, number)

    for _ in range(3):
        replay.repeated(step, x, 1)
    y, number = other(x)
    for _ in range(3):
        ((_, found, _),) = launches_of(spy, step, y, number)
    assert len(replay._known) == 2 and found[:2] == [y.data_ptr(), number]


def test_launches_that_somebody_watches_are_not_repeated(on_any_device, spy, monkeypatch):
    kernel, calls = replay.Kernel(spy), []

    def step(x):
        calls.append(1)
        kernel[(1,)](x, 1)

    x = torch.zeros(4)
    for _ in range(3):
        replay.repeated(step, x)
    monkeypatch.setattr(replay.triton.knobs.runtime.launch_enter_hook, "calls", [print])
    replay.repeated(step, x)
    assert len(calls) == 3


@pytest.mark.parametrize("hook, watched", [(None, False), (print, True)])
def test_a_hook_may_be_no_chain(monkeypatch, hook, watched):
    monkeypatch.setattr(replay.triton.knobs.runtime, "launch_enter_hook", hook)
    assert replay.watched() is watched


def test_what_the_interpreter_runs_is_not_repeated(monkeypatch):
    tensor = SimpleNamespace(device=torch.device("cuda", 0))
    for interpret in (False, True):
        monkeypatch.setattr(replay.triton.knobs.runtime, "interpret", interpret)
        assert replay.on_gpu(tensor) is not interpret


def test_another_workspace_is_another_kind(on_any_device, spy):
    kernel, x = replay.Kernel(spy), torch.zeros(4)

    def step(x):
        kernel[(1,)](x, flce_ops.get_workspace() if hasattr(flce_ops, "get_workspace") else 0)

    for nbytes in (1 << 20, 2 << 20):
        with flce_ops.workspace(nbytes):
            replay.repeated(step, x)
    assert len(replay._known) == 2


def test_old_kinds_are_forgotten(on_any_device, spy, monkeypatch):
    monkeypatch.setattr(replay, "KINDS_AT_MOST", 3)
    kernel = replay.Kernel(spy)

    def step(x, number):
        kernel[(1,)](x, number)

    for number in (1, 2, 3, 1, 4, 5):
        replay.repeated(step, torch.zeros(4), number)
    assert [kind[-1] for kind in replay._known] == [1, 4, 5]


def test_threads_forget_old_kinds_together(on_any_device, monkeypatch):
    monkeypatch.setattr(replay, "KINDS_AT_MOST", 2)
    x, errors, interval = torch.zeros(4), [], sys.getswitchinterval()

    def calls(thread):
        try:
            for number in range(3000):
                replay.repeated(lambda *_: None, x, thread, number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(thread,)) for thread in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
