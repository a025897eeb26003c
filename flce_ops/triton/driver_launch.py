"""Launches as the CUDA driver takes them: what Triton's launcher hands over is read off a captured graph, once.

    while it is captured   each pointer has an address of its own, in memory that nobody reads; the launcher runs on a
                           stream that captures, so that nothing is executed; the graph's one node holds the function,
                           the grid and the bytes of every parameter
    which hold addresses   8 bytes that equal one: a pointer. 128 bytes with one in them: a tensor map
    from then on           addresses are written into cells, cuTensorMapReplaceAddress changes the maps, cuLaunchKernel

H200's host: a launch through Triton's launcher takes 5 to 9 us, with tensor maps 21 to 30, of a step's sixteen 190 in
all. Parameters are read, not assumed, because their layout is Triton's own and changes with its versions.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
APART = 512  # bytes between the addresses while capturing; a tensor map wants 16
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads may do what they like meanwhile
# What Triton 3.6 to 3.9 say of a launch that is a function, a grid and parameters; tests/test_driver_launch.py looks.
PLAIN = {
    "num_ctas": 1,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
FUNCTIONS = (
    *("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphGetNodes", "cuGraphKernelNodeGetParams_v2"),
    *("cuGraphDestroy", "cuFuncGetParamInfo", "cuTensorMapReplaceAddress", "cuLaunchKernel"),
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain"),
)


class Place:
    """A pointer of repeated launches. Triton asks it, as any argument that is a tensor, for its address."""

    __slots__ = ("cell",)

    def __init__(self) -> None:
        self.cell = ctypes.c_uint64(0)

    def data_ptr(self) -> int:
        return self.cell.value


class Written(NamedTuple):
    """A launch that Triton made."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: tuple  # with Places for tensors


class KernelNodeParams(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class DriverLaunches:
    """The launches, to be repeated with whatever addresses are in their Places."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.launches: list[tuple[Callable, Any]] = []  # cuLaunchKernel up to the stream, the parameters
        self.maps: dict[bytes, tuple[Any, ctypes.c_uint64]] = {}  # where one is, the cell of its address
        self.kept_alive: list[Any] = []

    def run(self, stream: int) -> None:
        self.bind_context()
        replace_address, stream_pointer = driver().cuTensorMapReplaceAddress, ctypes.c_void_p(stream)
        for tensor_map, cell in self.maps.values():
            check(replace_address(tensor_map, cell))
        for launch, parameters in self.launches:
            check(launch(stream_pointer, parameters, None))

    def bind_context(self) -> None:
        """A thread that has not called CUDA yet has none."""
        library, context = driver(), ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(context))
        if not context:
            check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(self.device)))
            check(library.cuCtxSetCurrent(context))

    def add(self, node: KernelNodeParams, parameters: Sequence[bytes], places: dict[int, Place]) -> bool:
        """Whether all of its addresses are known."""
        pointers = []
        for value in parameters:
            place = places.get(int.from_bytes(value, "little")) if len(value) == 8 else None
            if place is not None:
                pointers.append(ctypes.addressof(place.cell))
            elif len(value) == TENSOR_MAP_BYTES:
                words = (int.from_bytes(value[i : i + 8], "little") for i in range(0, TENSOR_MAP_BYTES, 8))
                found = [places[word] for word in words if word in places]
                if len(found) != 1:
                    return False
                pointers.append(self.tensor_map(value, found[0]))
            else:
                buffer = ctypes.create_string_buffer(value, len(value))
                self.kept_alive.append(buffer)
                pointers.append(ctypes.addressof(buffer))
        numbers = [ctypes.c_uint(number) for number in (*node.grid, *node.block, node.shared_bytes)]
        launch = functools.partial(driver().cuLaunchKernel, ctypes.c_void_p(node.function), *numbers)
        self.launches.append((launch, (ctypes.c_void_p * len(pointers))(*pointers)))
        return True

    def tensor_map(self, value: bytes, place: Place) -> int:
        """Its address; launches with the same one share it."""
        if value not in self.maps:
            buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
            start = -(-ctypes.addressof(buffer) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
            ctypes.memmove(start, value, TENSOR_MAP_BYTES)
            self.kept_alive.append(buffer)
            self.maps[value] = ctypes.c_void_p(start), place.cell
        return self.maps[value][0].value


def driver_launches(written: Sequence[Written], places: Sequence[Place], device: torch.device) -> DriverLaunches | None:
    """None where they cannot be repeated so: a driver before CUDA 12.4, a kernel of clusters or with scratch memory."""
    if not all(hasattr(driver(), name) for name in FUNCTIONS) or not all(map(is_plain, written)):
        return None
    memory = torch.empty((len(places) + 1) * APART, dtype=torch.uint8, device=device)
    start = -(-memory.data_ptr() // APART) * APART
    by_address = {start + index * APART: place for index, place in enumerate(places)}
    for address, place in by_address.items():
        place.cell.value = address
    stream = torch.cuda.Stream(device).cuda_stream
    launches = DriverLaunches(device.index)
    return launches if all(capture(launches, one, stream, by_address) for one in written) else None


def is_plain(written: Written) -> bool:
    """Nothing but a function, a grid and parameters."""
    launcher = getattr(written.compiled, "run", None)
    return all(getattr(launcher, name, None) == value for name, value in PLAIN.items())


def capture(launches: DriverLaunches, written: Written, stream: int, places: dict[int, Place]) -> bool:
    """Whether it is one kernel, as it should be, with addresses that are known."""
    library, compiled, graph = driver(), written.compiled, ctypes.c_void_p()
    check(library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), RELAXED))
    try:
        compiled.run(
            *written.grid,
            *(stream, compiled.function, compiled.packed_metadata, None, None, None),  # no hooks
            *written.arguments,
        )
    finally:
        check(library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)))
    try:
        count, node, found = ctypes.c_size_t(), ctypes.c_void_p(), KernelNodeParams()
        check(library.cuGraphGetNodes(graph, None, ctypes.byref(count)))
        if count.value != 1:
            return False
        check(library.cuGraphGetNodes(graph, ctypes.byref(node), ctypes.byref(count)))
        check(library.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(found)))
        if not found.function or not found.parameters:
            return False
        values = [ctypes.string_at(found.parameters[i], size) for i, size in enumerate(sizes_of(found.function))]
        return launches.add(found, values, places)
    finally:
        library.cuGraphDestroy(graph)


def sizes_of(function: int) -> list[int]:
    """Bytes of each parameter."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver().cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes


def check(code: int) -> None:
    if code:
        raise RuntimeError(f"flce_ops: a kernel could not be launched again, the CUDA driver says CUresult {code}")


@functools.cache
def driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
