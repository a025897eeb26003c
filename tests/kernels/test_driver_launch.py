"""Launches that go to the driver without Triton: one by one, or as one graph if the same addresses come again."""

import pytest
import torch
from fake_driver import eight_bytes, in_place_of_cuda

driver_launch = pytest.importorskip("flce_ops.triton.launch.driver_launch")
launch_graphs = pytest.importorskip("flce_ops.triton.launch.launch_graphs")

CELL_AT = {}.get  # no address is memory of the step


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(launch_graphs, "_graphs", {})
    return in_place_of_cuda(monkeypatch, driver_launch, launch_graphs)


def launch_with(fake, *parameters):
    fake.sizes[77] = list(map(len, parameters))
    return driver_launch.Launch(77, (2, 3, 4, 128, 1, 1, 99), list(parameters))


def test_a_hook_on_launches_is_a_chain():
    """flce_ops/triton/launch/replay.py asks Triton whether somebody watches launches."""
    runtime = pytest.importorskip("triton").knobs.runtime
    assert runtime.launch_enter_hook.calls == runtime.launch_exit_hook.calls == []


def test_a_driver_launch_takes_new_addresses_and_keeps_its_other_parameters(fake):
    cells = {4096: driver_launch.Cell(), 8192: driver_launch.Cell()}
    launches, tensor_map = driver_launch.DriverLaunches(0), eight_bytes(8192) + bytes(range(120))
    parameters = eight_bytes(4096), eight_bytes(4097), tensor_map, (5).to_bytes(4, "little")
    for _ in range(2):
        assert launches.add(launch_with(fake, *parameters), cells.get)
    assert len(launches.maps) == 1  # both launches read the same map
    for address in (640, 1280):
        cells[4096].value, cells[8192].value = address, address + 64
        launches.run(5)
        found = fake.launched[-1]
        assert (found.function, found.numbers, found.stream) == (77, [2, 3, 4, 128, 1, 1, 99], 5)
        assert found.values == [address, 4097, address + 64, 5]
    with pytest.raises(RuntimeError, match="CUresult 719"):
        launches.run(0)


def test_maps_of_one_memory_that_two_parts_of_a_step_had_are_two():
    launches, tensor_map, cells = (
        driver_launch.DriverLaunches(0),
        bytes(128),
        (driver_launch.Cell(8), driver_launch.Cell(9)),
    )
    assert len({launches.tensor_map(tensor_map, cell) for cell in cells}) == len(launches.maps) == 2


def launches_of(fake, *parameters, cell_at=CELL_AT):
    launches = driver_launch.DriverLaunches(0)
    for _ in range(launch_graphs.LAUNCHES_AT_LEAST):
        launches.add(launch_with(fake, *parameters), cell_at)
    return launches


def test_launches_at_addresses_that_come_again_are_one_graph(fake, monkeypatch):
    cell, capturing = driver_launch.Cell(), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    launches = launches_of(fake, eight_bytes(4096), cell_at={4096: cell}.get)

    def call(address):
        """Works as Replay.run. Returns the addresses that the kernels ran with, and the number of launches."""
        fake.launched.clear()
        if not launch_graphs.launch_graph(launches, address, 5):
            cell.value = address
            launches.run(5)
            launch_graphs.remember(launches, address)
        if len(fake.launched) == 1:
            ((stream, kernels),) = fake.launched
            assert stream == 5 and all(kernel.stream == 3 for kernel in kernels)
        else:
            kernels = fake.launched
        assert len(kernels) == launch_graphs.LAUNCHES_AT_LEAST
        return {kernel.values[0] for kernel in kernels}, len(fake.launched)

    several = launch_graphs.LAUNCHES_AT_LEAST
    for address, times in ((640, several), (1280, several), (640, several), (640, 1), (1280, several), (1280, 1)):
        assert call(address) == ({address}, times)
    capturing = True  # another graph is being captured: only kernels may enter it
    assert call(640) == ({640}, several) and call(99) == ({99}, several)
    assert (launches, 99) not in launch_graphs._graphs
    capturing = False
    for address in range(2048, 2048 + launch_graphs.SETS_AT_MOST):
        call(address)
    assert call(1280) == ({1280}, several) and call(640) == ({640}, several) and sorted(fake.destroyed) == [1, 2]


def test_graphs_that_were_used_longest_ago_make_room_for_others(fake, monkeypatch):
    """Those of other kinds, too. A loop over more sets of addresses than are remembered makes no graph."""
    monkeypatch.setattr(launch_graphs, "SETS_AT_MOST", 2)
    first, second, third = (launches_of(fake) for _ in range(3))

    def has_graph(*launches):
        for _ in range(2):
            for one in launches:
                launch_graphs.remember(one, 640)
        return [launch_graphs.launch_graph(one, 640, 5) for one in launches]

    assert has_graph(first) == [True] and has_graph(second) == [True]
    assert launch_graphs.launch_graph(first, 640, 5)
    assert has_graph(third) == [True] and fake.destroyed == [2]  # the second one's
    assert launch_graphs.launch_graph(first, 640, 5) and not launch_graphs.launch_graph(second, 640, 5)
    assert has_graph(first, second, third) == [False] * 3 and not any(launch_graphs._graphs.values())
    monkeypatch.setattr(fake, "cuGraphInstantiateWithFlags", lambda *_: 900, raising=False)
    assert has_graph(second) == [False]
