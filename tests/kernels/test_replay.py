"""Launches are recorded once and repeated: they give the same bits, in memory that nothing else uses."""

import sys
import threading
from types import SimpleNamespace

import fake_driver
import pytest
import torch

import flce_ops

replay = pytest.importorskip("flce_ops.triton.launch.replay")
driver_launch = pytest.importorskip("flce_ops.triton.launch.driver_launch")
launch_graphs = pytest.importorskip("flce_ops.triton.launch.launch_graphs")


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(replay, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(replay, "current_stream", lambda device: fake_driver.CALLERS)
    monkeypatch.setattr(replay, "_known", {})
    return fake_driver.in_place_of_cuda(monkeypatch, driver_launch, launch_graphs, replay)


def launches_of(driver, step, *arguments):
    driver.launched.clear()
    replay.repeated(step, *arguments)
    return list(driver.launched)


def test_from_the_second_call_on_what_was_captured_is_launched_at_the_calls_addresses(driver):
    calls = []

    def step(x, pair):
        calls.append(1)
        driver.launch(1, x[1:], pair[0], 4, grid=(3,))
        driver.launch(2, pair[1].view(-1), 9, grid=(3, 2))
        return "result"

    for expected_calls in (1, 2, 2, 2):
        x, y = torch.zeros(4), torch.zeros(2, 3)
        seen = launches_of(driver, step, x, (y, y.new_zeros(6)))
        assert len(calls) == expected_calls and len(seen) == 2
        assert seen[0].values == [x.data_ptr() + 4, y.data_ptr(), 4]
    assert [(one.function, one.numbers[:3], one.stream) for one in seen] == [(1, [3, 1, 1], 5), (2, [3, 2, 1], 5)]
    assert seen[1].values[1:] == [9]
    assert replay.repeated(step, x, (y, y.new_zeros(6))) == "result"


def test_a_word_that_is_no_address_is_not_looked_for():
    """Launches have many such words, and a step of many chunks many temporaries."""
    recording = replay.Recording([torch.zeros(4)], SimpleNamespace(count=lambda: 0), None)
    recording.temporaries = SimpleNamespace(__reversed__=None)  # would raise
    assert recording.cell_at(0, 0) is None and recording.cell_at(0, 2**63) is None


def test_calls_with_more_results_of_their_own_are_another_kind(driver):
    """Compares an operator that returns its results with a similar one that writes the last result to an argument."""

    def step(x, *results):
        driver.launch(1, results[-1] if len(results) > 1 else x, 0)

    x = torch.zeros(4)
    for _ in range(4):
        loss, grad = torch.zeros(1), torch.zeros(4)
        for results, written in (((loss, grad), grad), ((loss,), x)):
            driver.launched.clear()
            replay.repeated(step, x, fresh=results)
            (seen,) = driver.launched
            assert seen.values[0] == written.data_ptr()
    assert [type(known) for known in replay._known.values()] == [replay.Replay] * 2


def test_memory_in_use_together_is_apart_and_other_memory_is_shared(driver):
    def step(x):
        first, second = x.new_empty(1000), x.new_empty(3000)
        driver.launch(1, x, first)
        driver.launch(1, first, second)
        driver.launch(1, second, x.new_empty(900))

    x = torch.zeros(4)
    for _ in range(3):
        seen = launches_of(driver, step, x)
    (known,) = replay._known.values()
    first, second, third = (one.values[1] for one in seen)
    assert {abs(first - second) >= 4000, abs(second - third) >= 3600} == {True}
    assert first == third and sum(known.blocks) < 4 * (1000 + 3000 + 900)


def test_memory_ends_within_its_block():
    """Three are in use together, the fourth after them. The large ones have blocks of their own size."""
    small = [replay.Temporary(nbytes, first=0, last=1) for nbytes in (1000, 3000, 500)]
    later = [replay.Temporary(700, first=2, last=2), replay.Temporary(replay.LARGE, first=0, last=2)]
    blocks = replay.share_memory(small + later)
    for temporary in small + later:
        assert 0 <= temporary.offset <= blocks[temporary.block] - temporary.nbytes


def test_memory_that_is_freed_and_had_again_is_told_apart_by_when(driver):
    """The allocator may give out an address again. The launch decides which tensor the address belongs to."""

    def step(x):
        for size in (64, 4096, 64):
            part = x.new_empty(size)
            driver.launch(1, x, part)
            driver.launch(1, part, x)
            del part

    for _ in range(3):
        seen = launches_of(driver, step, torch.zeros(4))
    (known,) = replay._known.values()
    assert sum(index < 0 for _, index, _ in known.cells) == 3 and len(seen) == 6
    assert all(seen[k].values == seen[k + 1].values[::-1] for k in (0, 2, 4))


def test_large_memory_is_allocated_in_the_sizes_of_the_step(driver):
    number = replay.LARGE // 4

    def step(x):
        first = x.new_empty(3 * number)
        driver.launch(1, x, first)
        for size in (number, 2 * number, 100):  # one after the other
            driver.launch(1, first, x.new_empty(size))

    for _ in range(3):
        replay.repeated(step, torch.zeros(4))
    (known,) = replay._known.values()
    assert known.blocks == [12 * number, 8 * number, 400]


def calls_of(driver, step, launches):
    """Counts how many of four calls run the step, which launches the given number of kernels on the caller's stream."""
    calls, x = [], torch.zeros(4)

    def counted(x):
        calls.append(1)
        return step(x)

    for _ in range(4):
        assert len(launches_of(driver, counted, x)) == launches and driver.current == fake_driver.CALLERS
    return len(calls)


def test_a_kernel_launched_by_other_means_is_repeated_where_its_parameters_are_understood(driver):
    """It does not matter who launched a kernel: what the stream was given is launched again."""

    def step(x):
        driver.launch(1, x, 1)
        driver.cuLaunchKernel(*driver_call(driver, 77, x))

    assert calls_of(driver, step, 2) == 2
    y = torch.zeros(4)
    assert launches_of(driver, step, y)[1].values == [y.data_ptr()]


def driver_call(driver, function, x):
    """Calls the driver as ctypes does."""
    ctypes = driver_launch.ctypes
    driver.sizes[function], value = [8], ctypes.c_uint64(x.data_ptr())
    driver.kept.append(value)
    numbers = [ctypes.c_uint(1)] * 7
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    return ctypes.c_void_p(function), *numbers, ctypes.c_void_p(driver.current), parameters, None


OUTSIDE = torch.zeros(4)
REFUSED = {
    "other work of ATen": lambda driver, x: x.add_(1),
    "a host read": lambda driver, x: int(x[0]),
    "a copy of memory": lambda driver, x: driver.copy_memory(),
    "pointers in a struct": lambda driver, x: driver.launch(2, bytes(16) + fake_driver.eight_bytes(x.data_ptr())),
    "memory of nobody": lambda driver, x: driver.launch(2, OUTSIDE),
    "a tensor map of unknown memory": lambda driver, x: driver.launch(2, bytes(128)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_step_that_does_more_than_launch_is_run_as_it_is_written(driver, what):
    driver.known.add(OUTSIDE.data_ptr())
    others = what not in ("other work of ATen", "a host read", "a copy of memory")

    def step(x):
        driver.launch(1, x, 1)
        REFUSED[what](driver, x)

    assert calls_of(driver, step, 1 + others) in (4, 5)  # once more if the step could not be captured
    assert list(replay._known.values()) == [replay.NOT_REPEATABLE]


@pytest.mark.parametrize("change", ["no driver", "cooperative", "clusters", "branches", "many launches", "no capture"])
def test_what_cannot_be_prepared_is_run_as_it_is_written(driver, monkeypatch, change):
    if change == "no driver":
        monkeypatch.setattr(replay, "driver", lambda: None)
    if change in ("cooperative", "clusters"):
        driver.attributes[2 if change == "cooperative" else 4] = 2
    if change == "many launches":
        monkeypatch.setattr(replay, "LAUNCHES_AT_MOST", 1)
    if change == "no capture":
        monkeypatch.setattr(driver, "cuStreamBeginCapture_v2", lambda *_: 900, raising=False)
    driver.branches = change == "branches"

    def step(x):
        for _ in range(3):
            driver.launch(1, x, 1)

    assert calls_of(driver, step, 3) == (4 if change in ("no driver", "no capture") else 5)
    assert list(replay._known.values()) == [replay.NOT_REPEATABLE]


def test_an_error_of_the_step_ends_the_capture(driver):
    def step(x):
        if driver.capturing:
            raise ValueError("of the step")

    replay.repeated(step, torch.zeros(4))
    with pytest.raises(ValueError, match="of the step"):
        replay.repeated(step, torch.zeros(4))
    assert not driver.capturing and driver.current == fake_driver.CALLERS


def test_arguments_that_share_memory_are_not_repeated(driver):
    both = torch.zeros(8)

    def step(x, y):
        driver.launch(1, x, y)

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
def test_another_kind_of_call_is_written_down_for_itself(driver, other):
    x = torch.zeros(4, 7)

    def step(x, number):
        driver.launch(1, x, number)

    for _ in range(3):
        replay.repeated(step, x, 1)
    y, number = other(x)
    for _ in range(3):
        (found,) = launches_of(driver, step, y, number)
    assert len(replay._known) == 2 and found.values == [y.data_ptr(), number]


def test_launches_that_somebody_watches_are_not_repeated(driver, monkeypatch):
    calls = []

    def step(x):
        calls.append(1)
        driver.launch(1, x, 1)

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
    tensor = SimpleNamespace(is_cuda=True)
    for interpret in (False, True):
        monkeypatch.setattr(replay, "INTERPRETED", interpret)
        assert replay.on_gpu(tensor) is not interpret


def test_another_workspace_is_another_kind(driver):
    x = torch.zeros(4)

    def step(x):
        driver.launch(1, x, flce_ops.get_workspace() if hasattr(flce_ops, "get_workspace") else 0)

    for nbytes in (1 << 20, 2 << 20):
        with flce_ops.workspace(nbytes):
            replay.repeated(step, x)
    assert len(replay._known) == 2


def test_old_kinds_are_forgotten(driver, monkeypatch):
    monkeypatch.setattr(replay, "KINDS_AT_MOST", 3)

    def step(x, number):
        driver.launch(1, x, number)

    for number in (1, 2, 3, 1, 4, 5):
        replay.repeated(step, torch.zeros(4), number)
    assert [kind[-1] for kind in replay._known] == [1, 4, 5]


def test_threads_forget_old_kinds_together(driver, monkeypatch):
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


def test_a_kind_of_an_operators_call_is_all_of_it_but_addresses():
    from flce_ops.meta.arguments import WithGrad

    def kind(tokens=4, **options):
        operands = torch.zeros(tokens, 16), torch.zeros(33, 16), torch.zeros(tokens, dtype=torch.int64)
        call = WithGrad.bind(*operands, None, None, None, **{"output_mask": [True, True, False]} | options)
        tensors, features = [], []
        replay.describe([call, 1], tensors, features)
        given = [value for value in call.values() if isinstance(value, torch.Tensor)]
        assert len(tensors) == len(given) and all(tensor is other for tensor, other in zip(tensors, given))
        return tuple(features)

    assert kind() == kind() and hash(kind()) == hash(kind())
    others = {"output_mask": [True, False, False]}, {"ignore_index": 3}, {"softcap": torch.tensor(3.0)}
    kinds = [kind(), kind(tokens=5), *(kind(**other) for other in others)]
    assert len(set(kinds)) == len(kinds)
