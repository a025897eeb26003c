"""A fake libcuda for triton/launch/driver_launch.py: streams that capture, graphs of kernels, and a record of launches.

`launch` is any kernel launch on the current stream: by Triton, by ctypes, or by a CUDA library.
"""

import ctypes
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

CALLERS, CAPTURING = 5, 3  # streams


class Launched(NamedTuple):
    function: int
    numbers: list[int]  # grid, block and bytes of shared memory
    stream: int
    parameters: list[bytes]

    @property
    def values(self) -> list[int]:
        return [int.from_bytes(value[:8], "little") for value in self.parameters]


class FakeDriver:
    def __init__(self) -> None:
        self.current = CALLERS
        self.launched: list[Launched] = []
        self.graphs: list[list[Launched | str]] = []
        self.capturing: dict[int, int] = {}  # stream -> graph
        self.sizes: dict[int, list[int]] = {}  # function -> bytes of its parameters
        self.destroyed: list[int] = []  # destroyed instances
        self.attributes: dict[int, int] = {}  # attributes that all kernels share
        self.known: set[int] = set()  # addresses of memory that CUDA knows
        self.branches = False
        self.kept: list[Any] = []

    def launch(self, function: int, *values: Any, grid: tuple[int, ...] = (1,)) -> None:
        """Each value becomes parameter bytes: a tensor's address, four bytes of an int, bytes as they are."""
        found = [eight_bytes(v.data_ptr()) if isinstance(v, torch.Tensor) else v for v in values]
        found = [v.to_bytes(4, "little") if isinstance(v, int) else v for v in found]
        assert self.sizes.setdefault(function, list(map(len, found))) == list(map(len, found))
        self.given(self.current, Launched(function, [*(*grid, 1, 1)[:3], 128, 1, 1, 99], self.current, found))

    def copy_memory(self) -> None:
        self.given(self.current, "a copy")

    def given(self, stream: int, what: Any) -> None:
        if stream in self.capturing:
            self.graphs[self.capturing[stream]].append(what)
        elif isinstance(what, Launched):
            self.launched.append(what)

    def cuCtxGetCurrent(self, context):
        context._obj.value = 1
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        assert stream.value == CAPTURING and mode == 2 and not self.capturing
        self.capturing[stream.value] = len(self.graphs)
        self.graphs.append([])
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream, status, identity, graph, dependencies, number):
        graph._obj.value = self.capturing[stream.value] + 1
        return 0

    def cuStreamEndCapture(self, stream, graph):
        if stream.value not in self.capturing:
            return 401  # CUDA_ERROR_ILLEGAL_STATE
        graph._obj.value = self.capturing.pop(stream.value) + 1
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):
        found = self.graphs[graph.value - 1]
        if nodes is None:
            count._obj.value = len(found)
        else:
            # nodes come in no particular order
            nodes[:] = [1000 * graph.value + index for index in range(len(found))][::-1]
        return 0

    def cuGraphGetEdges(self, graph, sources, targets, count):
        first, edges = 1000 * graph.value, max(len(self.graphs[graph.value - 1]) - 1, 0)
        for edge in range(edges):
            sources[edge], targets[edge] = first + edge * (not self.branches), first + edge + 1
        count._obj.value = edges
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, params):
        found = self.graphs[node.value // 1000 - 1][node.value % 1000]
        if not isinstance(found, Launched):
            return 1
        out, numbers = params._obj, found.numbers
        out.function, out.shared_bytes = found.function, numbers[6]
        out.grid[:], out.block[:] = numbers[:3], numbers[3:6]
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in found.parameters]
        array = (ctypes.c_void_p * max(len(buffers), 1))(*map(ctypes.addressof, buffers))
        self.kept += [buffers, array]
        out.parameters = array
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        value[0] = self.attributes.get(attribute, 0)
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        sizes = self.sizes[function.value]
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def cuPointerGetAttribute(self, value, attribute, address):
        return 0 if address.value in self.known else 1

    def cuTensorMapReplaceAddress(self, tensor_map, cell):
        ctypes.memmove(tensor_map, ctypes.addressof(cell), 8)
        return 0

    def cuLaunchKernel(self, function, *call):
        *numbers, stream, parameters, extra = call
        sizes = self.sizes[function.value]
        found = [ctypes.string_at(pointer, size) for pointer, size in zip(parameters, sizes, strict=True)]
        self.given(stream.value, Launched(function.value, [n.value for n in numbers], stream.value, found))
        return 0 if stream.value else 719

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


class OnStream:
    """Works as torch.cuda.stream."""

    def __init__(self, fake: FakeDriver, stream: Any) -> None:
        self.fake, self.stream = fake, stream

    def __enter__(self) -> None:
        self.before, self.fake.current = self.fake.current, self.stream.cuda_stream

    def __exit__(self, *_: object) -> None:
        self.fake.current = self.before


def eight_bytes(number: int) -> bytes:
    return number.to_bytes(8, "little")


def in_place_of_cuda(monkeypatch, *modules) -> FakeDriver:
    """Replaces CUDA in `modules`, and in what they use of torch.cuda."""
    fake, stream = FakeDriver(), SimpleNamespace(cuda_stream=CAPTURING)
    for module in modules:
        monkeypatch.setattr(module, "driver", lambda: fake)
        monkeypatch.setattr(module, "capture_stream", lambda device: stream, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: OnStream(fake, stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=fake.current))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(fake.capturing))
    return fake
