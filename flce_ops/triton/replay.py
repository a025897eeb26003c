"""A step's kernel launches, written down once and repeated: the host's time of a step is the driver's alone.

    1st call of a kind    the step as it is written
    2nd                   the same; every launch is written down: the compiled kernel, its grid, its arguments
    from the 3rd          temporary memory, addresses, launches

A kind is all that Python can branch on: the function, shapes, strides, dtypes and alignments of its tensors, its other
arguments, the workspace. What differs within one are addresses: a kernel's pointer is a Place, some bytes into a tensor
of the arguments or into the temporary memory, where what is not in use together may share its bytes. What has an
address goes to the driver without Triton (driver_launch.py); where all addresses are those of an earlier call, in one
launch (launch_graphs.py).

The first call of a kind writes nothing down, because tokens of ever new numbers would be slower with it.

Only a step of launches, allocations and views can be repeated; one that runs anything else of ATen, as class weights or
a bias's gradient do, is run as it is written.
"""

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from flce_ops.meta.call import Arguments
from flce_ops.support.torch_private import UncompiledDispatchMode
from flce_ops.support.workspace import get_workspace
from flce_ops.triton.driver_launch import DriverLaunches, Place, Written, driver_launches
from flce_ops.triton.launch_graphs import LaunchGraphs

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
LAUNCHES_AT_MOST = 2000  # of a kind: some 3 KiB each
ALIGNMENT = 512  # of an allocation, as the caching allocator has it
# Integer arguments of kernels, by name, that follow from how many tokens there are. Triton compiles a kernel again
# where one is 1, or a multiple of 16, unless it is told not to. Where a distance between rows is one of them, the kernel
# rounds it up to a multiple of 16 (kept_tokens.py).
VARIES_WITH_TOKENS = {
    *("N", "n", "rows", "rows_per_split", "first_rows", "count", "numbers", "room"),
    *("B", "G", "K", "L", "P", "W", "depth_of_parts", "first_tile", "steps"),
}
LARGE = 1 << 20  # bytes from which the caching allocator gives out blocks of about the size


@dataclass
class Temporary:
    """Memory that the step allocated, and the launches between which it is in use."""

    nbytes: int
    first: int = -1
    last: int = -1
    block: int = -1
    offset: int = 0

    def is_apart_from(self, other: "Temporary") -> bool:
        return self.last < other.first or other.last < self.first


class Kernel:
    """A Triton kernel, compiled once for all N. Launched as ever; a Recording in this thread writes it down."""

    def __init__(self, function: Any) -> None:
        self.function = function
        for parameter in getattr(function, "params", ()):  # the interpreter's have none
            parameter.do_not_specialize |= parameter.name in VARIES_WITH_TOKENS

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        launch = self.function[grid]
        recording = _recording.get()
        if recording is None:
            return launch

        def launch_and_write_down(*args, **options):
            bound = self.function.signature.bind(*args, **{k: v for k, v in options.items() if k in self.arg_names})
            bound.apply_defaults()
            recording.add(launch(*args, **options), (*grid, 1, 1)[:3], bound.args)

        return launch_and_write_down


class Recording(UncompiledDispatchMode):
    """Of one call: its launches, and where the memory is that they were given."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        # first byte, one past the last, which of the tensors
        self.given = sorted((*extent(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel())
        ends = [stop for _, stop, _ in self.given]
        apart = all(stop <= start for stop, (start, *_) in zip(ends, self.given[1:]))
        self.repeatable = apart  # else an address would not tell whose it is
        self.temporaries: list[Temporary] = []
        self.allocated: dict[int, Temporary] = {}  # by the address of its storage, the last one there
        self.places: dict[tuple[int, int], Place] = {}  # by (index of a tensor, bytes into it)
        self.temporary_places: dict[tuple[int, int], tuple[Place, Temporary, int]] = {}
        self.launches: list[Written] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            storage = result.untyped_storage()
            if storage.nbytes():
                self.allocated[storage.data_ptr()] = temporary = Temporary(storage.nbytes())
                self.temporaries.append(temporary)
        elif func not in VIEWS:
            self.repeatable = False
        return result

    def add(self, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        if len(self.launches) == LAUNCHES_AT_MOST:
            self.repeatable = False
        else:
            self.launches.append(Written(compiled, grid, tuple(map(self.placed, arguments))))

    def placed(self, value: Any) -> Any:
        """An argument of a launch, with Places for tensors."""
        if isinstance(value, Tensor):
            return self.place_of(value)
        if isinstance(value, tuple):
            parts = map(self.placed, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(getattr(value, "base", None), Tensor):  # a tensor map
            value = copy.copy(value)
            value.base = self.place_of(value.base)
        return value

    def place_of(self, tensor: Tensor) -> Place:
        if not tensor.numel():
            return Place()
        address, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        for start, stop, index in self.given:
            if start <= address < stop:
                return self.places.setdefault((index, address - start), Place())
        temporary = self.allocated.get(storage)
        if temporary is None:  # something that was there before and is no argument, or what other work made
            self.repeatable = False
            return Place()
        now = len(self.launches)
        temporary.first = now if temporary.first < 0 else temporary.first
        temporary.last = now
        offset = address - storage
        place, *_ = self.temporary_places.setdefault((id(temporary), offset), (Place(), temporary, offset))
        return place

    def every_place(self) -> list[Place]:
        return [*self.places.values(), *(place for place, *_ in self.temporary_places.values())]


def extent(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def share_memory(temporaries: Sequence[Temporary]) -> list[int]:
    """Gives each its block and its offset; the bytes of the blocks. Those in use together are apart.

    A large one has a block of its own size, perhaps after one another: in the step as it is written the allocator
    gave out that size, and has it again. The others are in the last block, the largest first, each at the lowest
    offset that is free for it.
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
    return [block[0].nbytes for block in blocks] + [max((t.offset + t.nbytes for t in small), default=0)]


class Replay:
    """What a Recording found, ready to be repeated."""

    def __init__(self, recording: Recording, launches: DriverLaunches, result: Any) -> None:
        self.blocks = share_memory([t for t in recording.temporaries if t.first >= 0])
        self.cells = [(place.cell, index, offset) for (index, offset), place in recording.places.items()]
        temporary_places = recording.temporary_places.values()
        self.temporary_cells = [(place.cell, t.block, t.offset + offset) for place, t, offset in temporary_places]
        self.launches, self.graphs = launches, LaunchGraphs(launches)
        self.result = result
        self.lock = threading.Lock()  # its cells are one thread's at a time

    def run(self, tensors: Sequence[Tensor]) -> Any:
        device = tensors[0].device
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in self.blocks]
        stream = current_stream(device.index)
        addresses, starts = tuple(map(Tensor.data_ptr, tensors)), tuple(map(Tensor.data_ptr, memory))
        if self.graphs.run((addresses, starts), stream):
            return self.result
        with self.lock:
            for cell, index, offset in self.cells:
                cell.value = addresses[index] + offset
            for cell, block, offset in self.temporary_cells:
                cell.value = starts[block] + offset
            self.launches.run(stream)
            self.graphs.add((addresses, starts))
        return self.result


SEEN_ONCE, NOT_REPEATABLE = object(), object()
_known: dict[Hashable, Any] = {}  # by kind; what was used last stands last
_recording: ContextVar[Recording | None] = ContextVar("flce_ops recording", default=None)


def repeated(step: Callable[..., Any], *arguments: Any, fresh: Sequence[Tensor] = ()) -> Any:
    """step(*arguments, *fresh), whose result holds no tensors. All memory it writes to, but its own, is in these.

    `fresh` was allocated for this call, and its shapes follow from the arguments and from how many it is.
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
    if isinstance(known, Replay):
        return known.run(tensors)
    if known is not SEEN_ONCE or torch.cuda.is_current_stream_capturing():  # while its graph grows, no other one
        forget_old_kinds()
        return step(*arguments, *fresh)
    recording = Recording(tensors)
    token = _recording.set(recording)
    try:
        with recording:
            result = step(*arguments, *fresh)
    finally:
        _recording.reset(token)
    _known[kind] = replay_of(recording, result, tensors[0].device) or NOT_REPEATABLE
    return result


def replay_of(recording: Recording, result: Any, device: torch.device) -> Replay | None:
    launches = None
    if recording.repeatable:
        launches = driver_launches(recording.launches, recording.every_place(), device)
    return None if launches is None else Replay(recording, launches, result)


def forget_old_kinds() -> None:
    with suppress(RuntimeError, StopIteration):  # another thread changes them: the next call goes on
        while len(_known) > KINDS_AT_MOST:
            _known.pop(next(iter(_known)), None)


def watched() -> bool:
    """Triton is to call somebody at each launch, a profiler say: repeated ones would pass that by."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of calls; None or a function, if one is set
    return any(getattr(hook, "calls", hook) for hook in hooks)


def current_stream(device: int) -> int:
    return triton.runtime.driver.active.get_current_stream(device)


def on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and not triton.knobs.runtime.interpret


def describe(values: Iterable[Any], tensors: list[Tensor], features: list[Hashable]) -> None:
    """The tensors among the values, and everything of these but the addresses and the numbers in the tensors."""
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            features.append((value.dtype, value.shape, value.stride(), value.device, value.data_ptr() % 16))
        elif isinstance(value, list | tuple):
            features.append((type(value), len(value)))
            describe(value, tensors, features)
        elif isinstance(value, Arguments):
            describe([type(value), *value.values()], tensors, features)
        else:
            features.append(value)
