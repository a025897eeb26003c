"""Captures a step's kernel launches once and repeats them, so that a step costs the host only the driver's launches.

    1st call of a kind    the step runs as written
    2nd                   captured: the stream's work becomes a graph, and nothing runs; then as the 3rd
    from the 3rd          allocates the temporary memory, sets the addresses, launches

A kind is everything that Python can branch on: the function; shapes, strides, dtypes and alignments of its tensors; its
other arguments; the workspace. Within a kind, only addresses differ. Each pointer of a kernel is a cell: an offset into
a tensor of the arguments or into the temporary memory. Temporaries that are not in use at the same time may share
bytes. The launches go to the driver without Triton (driver_launch.py). If all addresses are those of an earlier call,
they go as one launch (launch_graphs.py).

The first call of a kind is not captured: if the number of tokens changes in every call, capturing would only cost time.

The graph contains every launch on torch's current stream, whether Triton, a CUDA library or ctypes makes it. Work on
other streams is not captured, so steps must not use them. A step is repeated only if it consists of launches,
allocations and views. A step that runs other ATen operators (class weights and a bias's gradient do), copies memory, or
gives a kernel memory that is neither the arguments' nor its own runs as written each time.
"""

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ...meta.call import Arguments
from ...support.torch_private import UncompiledDispatchMode, current_stream
from ...support.vendor import compiling
from ...support.workspace import get_workspace
from .ahead import compile_first, compile_later
from .driver_launch import Capture, Cell, DriverLaunches, bind_context, capture_stream, driver
from .launch_graphs import launch_graph, remember

aten = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)
VIEWS = (
    aten.alias.default,
    aten.detach.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view.dtype,
)
KINDS_AT_MOST = 256
LAUNCHES_AT_MOST = 2000  # the most launches of a step; each takes about 3 KiB
ALIGNMENT = 512  # bytes that an allocation's address is a multiple of, as in torch's caching allocator
# Names of integer kernel arguments that depend on the number of tokens. Unless it is told not to, Triton compiles a
# kernel again if such an argument is 1 or a multiple of 16. If a distance between rows is among them, the kernel rounds
# it up to a multiple of 16 (valid_tokens.py).
VARIES_WITH_TOKENS = {
    *("N", "n", "rows", "rows_per_split", "first_rows", "numbers", "room"),
    *("B", "L", "P", "depth_of_splits", "first_tile", "steps"),
}
KNOBS = triton.knobs.runtime
INTERPRETED = KNOBS.interpret  # Triton reads it when a kernel is defined
LARGE = 1 << 20  # from this size on, the caching allocator's blocks have about the requested size


@dataclass(eq=False)
class Temporary:
    """Memory that the step allocated. It is in use from launch `first` to launch `last`."""

    nbytes: int
    address: int = 0
    # number of launches before its allocation; earlier launches may have used other memory at its address
    since: int = 0
    first: int = -1
    last: int = -1
    block: int = -1
    offset: int = 0

    def is_apart_from(self, other: "Temporary") -> bool:
        return self.last < other.first or other.last < self.first


def Kernel(function: Any) -> Any:
    """A Triton kernel that is compiled once for all N. Compiling ahead (ahead.py) does not launch the kernel."""
    kernel = triton.jit(function, do_not_specialize=VARIES_WITH_TOKENS)
    if not hasattr(kernel, "params"):  # the kernel runs in the interpreter
        return kernel
    launch, jitted = kernel.run, type(kernel)

    def run(*args: Any, **options: Any) -> Any:
        ahead = compiling.get()
        if ahead is None:
            return launch(*args, **options)
        ahead.launches += 1
        return launch(*args, **(options | {"warmup": True}))

    def compile_now_or_later(key: Hashable, signature: Any, device: int, *others: Any, **options: Any) -> Any:
        compile_it = functools.partial(jitted._do_compile, kernel, key, signature, device, *others, **options)
        return compile_it() if compiling.get() is None else compile_later(kernel, key, device, compile_it)

    kernel.run, kernel._do_compile = run, compile_now_or_later
    return kernel


class NotRepeatable(Exception):
    """The step does more than launch, allocate and view."""


class Recording(UncompiledDispatchMode):
    """Records which memory the launches of a captured step use: tensors of the arguments, or memory that the step
    allocates.
    """

    def __init__(self, tensors: Sequence[Tensor], capture: Capture, allocating: Any) -> None:
        super().__init__()
        # (first byte, one past the last, index of the tensor)
        self.given = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel())
        ends = [stop for _, stop, _ in self.given]
        if any(stop > start for stop, (start, *_) in zip(ends, self.given[1:])):
            raise NotRepeatable("two arguments overlap, so an address may belong to either")
        self.capture = capture
        self.allocating = allocating  # a context: allocations come from the caller's stream, as usual
        self.temporaries: list[Temporary] = []
        self.lowest = min((start for start, *_ in self.given), default=0)  # of all addresses
        self.highest = max(ends, default=0)
        self.cells: dict[tuple[int | Temporary, int], Cell] = {}  # keyed by (what holds the address, offset in it)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in VIEWS:
            return func(*args, **(kwargs or {}))
        if func not in ALLOCATIONS:
            raise NotRepeatable(func)
        with self.allocating:
            result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage()
        if storage.nbytes():
            address = storage.data_ptr()
            self.temporaries.append(Temporary(storage.nbytes(), address, self.capture.count()))
            self.lowest, self.highest = min(self.lowest, address), max(self.highest, address + storage.nbytes())
        return result

    def cell_at(self, now: int, address: int) -> Cell | None:
        """The cell of an address in launch `now`; None if the address is not in the step's memory."""
        if not self.lowest <= address < self.highest:  # most words of a launch's arguments are no address
            return None
        for start, stop, index in self.given:
            if start <= address < stop:
                return self.cells.setdefault((index, address - start), Cell())
        for temporary in reversed(self.temporaries):
            if temporary.since <= now and 0 <= address - temporary.address < temporary.nbytes:
                temporary.first = now if temporary.first < 0 else temporary.first
                temporary.last = now
                return self.cells.setdefault((temporary, address - temporary.address), Cell())
        return None

    def launches(self, device: int) -> DriverLaunches | None:
        """None if the launches cannot be repeated."""
        captured = self.capture.launches() if self.capture.count() <= LAUNCHES_AT_MOST else None
        launches = DriverLaunches(device)
        for now, launch in enumerate(captured or ()):
            if not launches.add(launch, functools.partial(self.cell_at, now)):
                return None
        return None if captured is None else launches


def extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def share_memory(temporaries: Sequence[Temporary]) -> list[int]:
    """Assigns each temporary a block and an offset, and returns the sizes of the blocks. Temporaries in use together
    stay apart.

    A large temporary gets a block of its own size, which several may use one after another: the caching allocator has
    blocks of that size, because the step as written requested them. All others share the last block. They are placed by
    size, the largest first, each at the lowest free offset.
    """
    blocks: list[list[Temporary]] = []
    small: list[Temporary] = []
    for temporary in sorted(temporaries, key=lambda t: -t.nbytes):
        if temporary.nbytes >= LARGE:
            free = (i for i, block in enumerate(blocks) if all(map(temporary.is_apart_from, block)))
            temporary.block = next(free, len(blocks))
            if temporary.block == len(blocks):
                blocks.append([])
            blocks[temporary.block].append(temporary)
            continue
        for other in sorted(small, key=lambda t: t.offset):
            if not temporary.is_apart_from(other) and other.offset < temporary.offset + temporary.nbytes:
                behind = -(-(other.offset + other.nbytes) // ALIGNMENT) * ALIGNMENT
                temporary.offset = max(temporary.offset, behind)
        small.append(temporary)
    for temporary in small:
        temporary.block = len(blocks)
    sizes = [block[0].nbytes for block in blocks]
    return [*sizes, max(t.offset + t.nbytes for t in small)] if small else sizes


class Replay:
    """A Recording's launches and memory, ready to be repeated."""

    def __init__(self, recording: Recording, launches: DriverLaunches, result: Any) -> None:
        self.blocks = share_memory([t for t in recording.temporaries if t.first >= 0])
        self.cells: list[tuple[Cell, int, int]] = []  # the cell, whose address, and the offset
        for (owner, offset), cell in recording.cells.items():
            if isinstance(owner, Temporary):  # the addresses of blocks come last
                self.cells.append((cell, owner.block - len(self.blocks), owner.offset + offset))
            else:
                self.cells.append((cell, owner, offset))
        self.launches = launches
        self.result = result
        self.lock = threading.Lock()  # one thread at a time uses the cells

    def run(self, tensors: Sequence[Tensor]) -> Any:
        device = tensors[0].device
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in self.blocks]
        stream = current_stream(device.index)
        addresses = tuple(map(Tensor.data_ptr, (*tensors, *memory)))
        if launch_graph(self.launches, addresses, stream):
            return self.result
        with self.lock:
            for cell, index, offset in self.cells:
                cell.value = addresses[index] + offset
            self.launches.run(stream)
            remember(self.launches, addresses)
        return self.result


PLAIN = {type(None), bool, int, float, str}
SEEN_ONCE, NOT_REPEATABLE = object(), object()
_known: dict[Hashable, Any] = {}  # by kind; the most recently used kind stands last


def repeated(step: Callable[..., Any], *arguments: Any, fresh: Sequence[Tensor] = ()) -> Any:
    """Runs step(*arguments, *fresh), or repeats the launches of an earlier call. The step's result holds no tensors.

    The step writes only to `arguments`, to `fresh` and to memory that it allocates. `fresh` holds the tensors that were
    allocated for this call. Their shapes depend on the arguments and on `len(fresh)`.
    """
    tensors: list[Tensor] = []
    features: list[Hashable] = [step, get_workspace(), len(fresh)]
    describe(arguments, tensors, features)
    tensors += fresh
    if not on_gpu(tensors[0]) or watched():
        return step(*arguments, *fresh)
    kind = tuple(features)
    known = _known.pop(kind, None)
    _known[kind] = SEEN_ONCE if known is None else known
    if known is None:
        compile_first()
    if isinstance(known, Replay):
        return known.run(tensors)
    # during a capture no second graph is captured
    if known is not SEEN_ONCE or torch.cuda.is_current_stream_capturing():
        forget_old_kinds()
        return step(*arguments, *fresh)
    replay = captured(lambda: step(*arguments, *fresh), tensors)
    _known[kind] = replay or NOT_REPEATABLE
    return replay.run(tensors) if isinstance(replay, Replay) else step(*arguments, *fresh)


def captured(step: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
    """Captures the step, without running it, and returns a Replay. None if the step cannot be repeated; SEEN_ONCE if
    the next call should try again.
    """
    device = tensors[0].device
    if driver() is None:
        return None
    bind_context(device.index)
    stream, allocating = capture_stream(device.index), torch.cuda.stream(torch.cuda.current_stream(device))
    capture = Capture(stream.cuda_stream)
    try:
        recording = Recording(tensors, capture, allocating)
        with capture, torch.cuda.stream(stream), recording:
            result = step()
    except torch.OutOfMemoryError:  # a lack of memory does not mean that the step cannot be repeated
        return SEEN_ONCE
    except (NotRepeatable, RuntimeError):  # work that cannot be captured; as written, the step may still run
        return None
    launches = recording.launches(device.index)
    return None if launches is None else Replay(recording, launches, result)


def forget_old_kinds() -> None:
    with suppress(RuntimeError, StopIteration):  # another thread changes the dictionary; the next call will finish
        while len(_known) > KINDS_AT_MOST:
            _known.pop(next(iter(_known)), None)


def watched() -> bool:
    """Whether something, such as a profiler, has asked Triton to be called at each launch. Repeated launches would
    bypass it.
    """
    enter, leave = KNOBS.launch_enter_hook, KNOBS.launch_exit_hook
    # chains of calls; otherwise None, or one function
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and not INTERPRETED


def describe(values: Iterable[Any], tensors: list[Tensor], features: list[Hashable]) -> None:
    """Appends the tensors among the values to `tensors`, and to `features` everything about the values except the
    addresses and contents of tensors.
    """
    for value in values:
        if type(value) in PLAIN:  # the most frequent case first
            features.append(value)
        elif isinstance(value, Tensor):
            tensors.append(value)
            features.append(layout_of(value))
        elif isinstance(value, (list, tuple)):  # with a tuple, isinstance is three times as fast
            features.append((type(value), len(value)))
            describe(value, tensors, features)
        elif isinstance(value, Arguments):
            own = value.values()
            for index in value.tensors:
                tensor = own[index]
                if tensor is not None:
                    tensors.append(tensor)
                    own[index] = layout_of(tensor)
            for index in value.lists:
                own[index] = tuple(own[index])
            features += (value.op, *own)
        else:
            features.append(value)


def layout_of(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device(), tensor.data_ptr() % 16
