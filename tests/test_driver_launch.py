"""Launches handed to the driver without Triton, one by one or, at addresses that come again, as one graph."""

import ctypes
import inspect
from types import SimpleNamespace

import pytest
import torch

replay = pytest.importorskip("flce_ops.triton.replay")
driver_launch = pytest.importorskip("flce_ops.triton.driver_launch")
launch_graphs = pytest.importorskip("flce_ops.triton.launch_graphs")


def test_what_is_private_to_triton_is_there():
    """The launcher is called as Triton calls it, and says what a launch is beside its function and parameters."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    jit = pytest.importorskip("triton.runtime.jit")
    called_with = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    assert called_with in inspect.getsource(jit.JITFunction.run)
    made = inspect.getsource(driver.CudaLauncher.__init__)
    assert all(f"self.{name} = " in made for name in driver_launch.PLAIN)
    for hook in (replay.triton.knobs.runtime.launch_enter_hook, replay.triton.knobs.runtime.launch_exit_hook):
        assert hook.calls == []


class Driver:
    """Of the functions of libcuda: launches are written down, a tensor map holds its address in its first word."""

    def __init__(self):
        self.launched = []

    def cuCtxGetCurrent(self, context):
        context._obj.value = 1
        return 0

    def cuTensorMapReplaceAddress(self, tensor_map, cell):
        ctypes.memmove(tensor_map, ctypes.addressof(cell), 8)
        return 0

    def cuLaunchKernel(self, function, *call):
        *numbers, stream, parameters, extra = call
        found = [ctypes.string_at(pointer, 8) for pointer in parameters]
        self.launched.append((function.value, [n.value for n in numbers], stream.value, found))
        return 0 if stream.value else 719


def eight_bytes(number):
    return number.to_bytes(8, "little")


def test_a_driver_launch_takes_new_addresses_and_keeps_its_other_parameters(monkeypatch):
    fake, place, base = Driver(), replay.Place(), replay.Place()
    monkeypatch.setattr(driver_launch, "driver", lambda: fake)
    node = driver_launch.KernelNodeParams(function=77, grid=(2, 3, 4), block=(128, 1, 1), shared_bytes=99)
    launches, places = driver_launch.DriverLaunches(0), {4096: place, 8192: base}
    tensor_map = eight_bytes(8192) + bytes(range(120))
    parameters = [eight_bytes(4096), eight_bytes(4097), tensor_map, (5).to_bytes(4, "little")]
    assert launches.add(node, parameters, places) and launches.add(node, [tensor_map], places)
    assert len(launches.maps) == 1  # both launches read one
    for address in (640, 1280):
        place.cell.value, base.cell.value = address, address + 64
        launches.run(5)
        (function, numbers, stream, found), (*_, of_map) = fake.launched[-2:]
        assert (function, numbers, stream) == (77, [2, 3, 4, 128, 1, 1, 99], 5)
        assert found[:3] == [eight_bytes(address), eight_bytes(4097), eight_bytes(address + 64)]
        assert found[3][:4] == (5).to_bytes(4, "little") and of_map == [eight_bytes(address + 64)]
    with pytest.raises(RuntimeError, match="CUresult 719"):
        launches.run(0)


class GraphDriver(Driver):
    """A graph is what was launched on a stream that captures; 3 is the capture stream of these tests."""

    def __init__(self):
        super().__init__()
        self.graphs, self.destroyed = [], []

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert stream.value == 3 and mode == driver_launch.RELAXED
        self.outside, self.launched = self.launched, []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        self.graphs.append(self.launched)
        self.launched, graph._obj.value = self.outside, len(self.graphs)
        return 0

    def cuGraphInstantiateWithFlags(self, instance, graph, flags):
        instance._obj.value = graph.value
        return 0

    def cuGraphLaunch(self, instance, stream):
        self.launched.append((stream.value, self.graphs[instance.value - 1]))
        return 0

    def cuGraphDestroy(self, graph):
        return 0

    def cuGraphExecDestroy(self, instance):
        self.destroyed.append(instance.value)
        return 0


def test_launches_at_addresses_that_come_again_are_one_graph(monkeypatch):
    fake, place, capturing = GraphDriver(), replay.Place(), False
    for module in (driver_launch, launch_graphs):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(launch_graphs, "capture_stream", lambda device: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(launch_graphs, "_graphs", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    launches = driver_launch.DriverLaunches(0)
    node = driver_launch.KernelNodeParams(function=77, grid=(2, 3, 4), block=(128, 1, 1), shared_bytes=99)
    for _ in range(launch_graphs.LAUNCHES_AT_LEAST):
        launches.add(node, [eight_bytes(4096)], {4096: place})
    graphs = launch_graphs.LaunchGraphs(launches)

    def call(address):
        """As Replay.run; the addresses that kernels then ran with, and how many launches it took."""
        fake.launched.clear()
        if not graphs.run(address, 5):
            place.cell.value = address
            launches.run(5)
            graphs.add(address)
        if len(fake.launched) == 1:
            ((stream, kernels),) = fake.launched
            assert stream == 5 and all(on == 3 for *_, on, _ in kernels)
        else:
            kernels = fake.launched
        assert len(kernels) == launch_graphs.LAUNCHES_AT_LEAST
        return {int.from_bytes(found, "little") for *_, (found,) in kernels}, len(fake.launched)

    several = launch_graphs.LAUNCHES_AT_LEAST
    for address, times in ((640, several), (1280, several), (640, several), (640, 1), (1280, several), (1280, 1)):
        assert call(address) == ({address}, times)
    capturing = True  # the graph of another: nothing but kernels goes into it
    assert call(640) == ({640}, several) and call(99) == ({99}, several) and 99 not in graphs.known
    capturing = False
    for address in range(2048, 2048 + launch_graphs.ADDRESSES_AT_MOST):
        call(address)
    assert len(graphs.known) == launch_graphs.ADDRESSES_AT_MOST and sorted(fake.destroyed) == [1, 2]


def test_graphs_that_nobody_used_make_room_for_others(monkeypatch):
    """Of other kinds, too; while all are in use there are no more."""
    fake, now = GraphDriver(), [0.0]
    for module in (driver_launch, launch_graphs):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(launch_graphs, "capture_stream", lambda device: SimpleNamespace(cuda_stream=3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch_graphs, "_graphs", [])
    monkeypatch.setattr(launch_graphs, "GRAPHS_AT_MOST", 2)
    monkeypatch.setattr(launch_graphs, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def kind():
        launches = driver_launch.DriverLaunches(0)
        for _ in range(launch_graphs.LAUNCHES_AT_LEAST):
            launches.add(driver_launch.KernelNodeParams(function=77), [], {})
        return launch_graphs.LaunchGraphs(launches)

    def has_graph(graphs):
        for _ in range(2):
            graphs.add(640)
        return graphs.run(640, 5)

    first, second, third = kind(), kind(), kind()
    assert has_graph(first) and has_graph(second) and not has_graph(third)
    now[0] += 2 * launch_graphs.IDLE_SECONDS
    assert has_graph(first) and has_graph(third) and not second.run(640, 5) and fake.destroyed == [2]
    assert first.run(640, 5) and len(launch_graphs._graphs) == 2
    now[0] += 2 * launch_graphs.IDLE_SECONDS
    monkeypatch.setattr(fake, "cuGraphInstantiateWithFlags", lambda *_: 900, raising=False)
    assert not has_graph(second) and not second.usable


def test_a_tensor_map_of_unknown_memory_is_not_repeated():
    launches = driver_launch.DriverLaunches(0)
    assert not launches.add(driver_launch.KernelNodeParams(), [bytes(128)], {4096: replay.Place()})
