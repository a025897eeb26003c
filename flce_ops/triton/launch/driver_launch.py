"""Reads a step's launches off a captured CUDA graph, and then launches them through the CUDA driver, without Triton.

    while a step is captured   nothing runs; all work for the stream, from Triton or elsewhere, becomes a node
    each node                  must be a kernel, one after another: its function, its grid, the bytes of its parameters
    its addresses       8 bytes that point into known memory: a pointer. 128 bytes with one in them: a tensor map
    from then on               addresses are written into cells, cuTensorMapReplaceAddress changes the maps,
                               cuLaunchKernel launches

Graphs with copies, branches, clusters, or pointers to memory that the step was not given are refused.

On an H200's host, a launch through Triton's launcher takes 5 to 9 us, with tensor maps 21 to 30 us, so a step of
sixteen launches takes 190 us. The parameters are read from the graph, because their layout is Triton's own and changes
between versions.
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit waiting for the default stream, which cannot be captured
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads may use CUDA meanwhile
MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
# A launch is plain if it consists of a function, a grid and parameters only. Then these attributes have at most these
# values: 2 is CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 4 CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION (each of its numbers).
# Programmatic dependent launches make cuGraphGetEdges fail, so the step is refused.
PLAIN = {2: 0, 4: 1}


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


class Launch(NamedTuple):
    """A captured kernel."""

    function: int
    numbers: tuple[int, ...]  # grid, block, bytes of shared memory
    parameters: list[bytes]


class Capture:
    """A context manager. Work that is put on the stream inside becomes a graph, and does not run."""

    _one_at_a_time = threading.Lock()  # all captures of a device share one stream

    def __init__(self, stream: int) -> None:
        self.stream, self.graph = ctypes.c_void_p(stream), ctypes.c_void_p()

    def __enter__(self) -> "Capture":
        self._one_at_a_time.acquire()
        try:
            check(driver().cuStreamBeginCapture_v2(self.stream, RELAXED))
            status, graph = ctypes.c_int(), ctypes.byref(self.graph)
            driver().cuStreamGetCaptureInfo_v2(self.stream, ctypes.byref(status), None, graph, None, None)
        except BaseException:  # catches an interrupt, too: without the release, the next capture would wait for ever
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        check(self.end())

    def end(self) -> int:
        """Ends the capture and returns the driver's status, which is an error if no capture had begun."""
        self.graph = ctypes.c_void_p()
        try:
            return driver().cuStreamEndCapture(self.stream, ctypes.byref(self.graph))
        finally:
            self._one_at_a_time.release()

    def __del__(self) -> None:
        if self.graph:
            driver().cuGraphDestroy(self.graph)

    def count(self) -> int:
        """The number of nodes so far."""
        count = ctypes.c_size_t()
        check(driver().cuGraphGetNodes(self.graph, None, ctypes.byref(count)))
        return count.value

    def launches(self) -> list[Launch] | None:
        """The launches in their order; None unless the graph is a sequence of plain kernels."""
        count = self.count()
        nodes, sources, targets = ((ctypes.c_void_p * count)() for _ in range(3))
        number, edges = ctypes.c_size_t(count), ctypes.c_size_t(count)
        check(driver().cuGraphGetNodes(self.graph, nodes, ctypes.byref(number)))
        if driver().cuGraphGetEdges(self.graph, sources, targets, ctypes.byref(edges)):
            return None
        following = dict(zip(sources[: edges.value], targets[: edges.value]))
        firsts = set(nodes) - set(following.values())
        found: list[Launch] = []
        node = firsts.pop() if len(firsts) == 1 and edges.value == count - 1 else None
        while node is not None:
            launch = launch_of(node)
            if launch is None:
                return None
            found.append(launch)
            node = following.get(node)
        return found if len(found) == count else None


def launch_of(node: int) -> Launch | None:
    """The launch of a graph node; None if it is not a plain kernel."""
    found = KernelNodeParams()
    failed = driver().cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(found))
    if failed or not found.function or not found.parameters:
        return None
    for attribute, most in PLAIN.items():
        value = (ctypes.c_uint * 16)()  # CUlaunchAttributeValue, a union of 64 bytes
        failed = driver().cuGraphKernelNodeGetAttribute(ctypes.c_void_p(node), attribute, value)
        if failed or max(value[:3]) > most:
            return None
    parameters = [ctypes.string_at(found.parameters[i], size) for i, size in enumerate(sizes_of(found.function))]
    return Launch(found.function, (*found.grid, *found.block, found.shared_bytes), parameters)


def sizes_of(function: int) -> list[int]:
    """The size of each parameter in bytes."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not driver().cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)
    ):
        sizes.append(size.value)
    return sizes


Cell = ctypes.c_uint64  # the memory of one address, read at each repeated launch


class DriverLaunches:
    """Launches that can be repeated. Their pointers are read from cells, so a repetition can use other addresses."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.launches: list[tuple[Callable, Any]] = []  # (cuLaunchKernel without its last arguments, the parameters)
        # by content and cell: (the tensor map, the cell of its address)
        self.maps: dict[tuple[bytes, int], tuple[Any, Cell]] = {}
        self.kept_alive: list[Any] = []

    def run(self, stream: int) -> None:
        bind_context(self.device)
        replace_address, stream_pointer = driver().cuTensorMapReplaceAddress, ctypes.c_void_p(stream)
        for tensor_map, cell in self.maps.values():
            check(replace_address(tensor_map, cell))
        for launch, parameters in self.launches:
            check(launch(stream_pointer, parameters, None))

    def add(self, launch: Launch, cell_at: Callable[[int], Cell | None]) -> bool:
        """Adds a launch. Returns whether `cell_at` has a cell for each of its addresses."""
        pointers = []
        for value in launch.parameters:
            cells = [cell_at(int.from_bytes(value[i : i + 8], "little")) for i in range(0, len(value) - 7, 8)]
            found = [cell for cell in cells if cell is not None]
            if len(value) == TENSOR_MAP_BYTES and len(found) == 1:
                pointers.append(self.tensor_map(value, found[0]))
            elif len(value) == 8 and found:
                self.kept_alive.append(found[0])
                pointers.append(ctypes.addressof(found[0]))
            elif len(value) < 8 or len(value) == 8 and not is_address(int.from_bytes(value, "little")):
                buffer = ctypes.create_string_buffer(value, len(value))
                self.kept_alive.append(buffer)
                pointers.append(ctypes.addressof(buffer))
            else:
                return False
        numbers = map(ctypes.c_uint, launch.numbers)
        again = functools.partial(driver().cuLaunchKernel, ctypes.c_void_p(launch.function), *numbers)
        self.launches.append((again, (ctypes.c_void_p * len(pointers))(*pointers)))
        return True

    def tensor_map(self, value: bytes, cell: Cell) -> int:
        """The address of the tensor map; launches with the same map share it."""
        key = value, ctypes.addressof(cell)
        if key not in self.maps:
            buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
            start = -(-ctypes.addressof(buffer) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
            ctypes.memmove(start, value, TENSOR_MAP_BYTES)
            self.kept_alive.append(buffer)
            self.maps[key] = ctypes.c_void_p(start), cell
        return self.maps[key][0].value


def is_address(number: int) -> bool:
    """Whether the number is an address of memory that CUDA knows."""
    memory_type = ctypes.c_uint()
    asked = ctypes.byref(memory_type), MEMORY_TYPE, ctypes.c_uint64(number)
    return number != 0 and driver().cuPointerGetAttribute(*asked) == 0


def bind_context(device: int) -> None:
    """Makes the device's context current: a thread that has not called CUDA yet has no context."""
    library, context = driver(), ctypes.c_void_p()
    library.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(device)))
        check(library.cuCtxSetCurrent(context))


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """A stream of our own. Another thread may use a stream from torch's pool, and its work would be captured, too."""
    stream = ctypes.c_void_p()
    check(driver().cuStreamCreate(ctypes.byref(stream), NON_BLOCKING))
    return torch.cuda.ExternalStream(stream.value, device=device)


def check(status: int) -> None:  # a CUresult
    if status:
        raise RuntimeError(f"flce_ops: a kernel could not be launched again, the CUDA driver says CUresult {status}")


@functools.cache
def driver() -> Any:
    """None if there is no driver, or if it is older than CUDA 12.4."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuFuncGetParamInfo") else None  # the youngest function that is used here
