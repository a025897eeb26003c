"""The first call of a head compiles its kernels in parallel before it launches the first one.

    run the call on meta tensors    The launcher branches as usual. A launch only hands its kernel to a thread, which
                                    compiles and loads the kernel.
    run the call                    All kernels are there.

One after another the kernels of a step take 14 s. A kernel that was not compiled like this is compiled at its launch,
as Triton does it.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

from ..meta.call import Arguments
from ..support.workspace import get_workspace, rows_to_retain
from .kernel import launches
from .rows.after_chunks import launch_scale_in_place

logger = logging.getLogger("flce_ops")

# The kernels are compiled for these numbers of tokens, besides the call's own: one tile of rows, and several chunks.
TOKENS = (1, 65536)
# Arguments whose first dimension is classes. The first dimension of all others is tokens.
OF_CLASSES = {"linear_weight", "linear_bias", "weight", "main_grad", "teacher_weight", "teacher_bias"}
_compiled: set[Hashable] = set()  # (device, kind) of calls


def compiled_first(launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorates a function that takes a call and launches its kernels."""

    @functools.wraps(launch)
    def run(call: Arguments) -> Any:
        device = call.operands[0].device  # type: ignore[attr-defined]
        if device.type == "cuda":
            kind = device, *kind_of(call)
            if kind not in _compiled and not torch.cuda.is_current_stream_capturing():
                _compiled.add(kind)
                try:
                    compile_kernels(launch, call, device)
                except Exception as error:  # the call compiles what it needs, and raises the error if it has to
                    logger.warning("%s: its kernels are compiled one by one: %r", call.op, error)
        return launch(call)

    return run


def compile_kernels(launch: Callable[[Any], Any], call: Arguments, device: torch.device) -> None:
    """Compiles and loads the kernels that `launch(call)` and its backward launch, for few tokens and for many."""
    with torch.cuda.device(device), Loader(device) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        launches.only_compile = True
        try:
            for tokens in (call.operands[0].shape[0], *TOKENS):  # type: ignore[attr-defined]
                made = launch(on_meta(call, tokens))
            if call.results[0].name == "loss":
                gradients = [value for value, result in zip(made, call.results) if result.operand and value.numel()]
                launch_scale_in_place(gradients, made[0])
        finally:
            launches.only_compile = False


# Triton 3.6 compiles a launcher in C for each signature of a kernel, and imports it as a Python module. All these
# modules have one name. If two threads import at once, a kernel can get the launcher of another, whose call fails with
# "function takes exactly 24 arguments (36 given)".
loading = threading.Lock()


class Loader(ThreadPoolExecutor):
    """Threads that load onto the device what they have compiled."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(2 * (os.cpu_count() or 1))  # half of them wait: for the GIL, or for ptxas and gcc
        self.device = device

    def submit(self, compile: Callable, /, *args: Any, **options: Any) -> Future:
        def compile_and_load() -> Any:
            kernel = compile(*args, **options)
            with loading, torch.cuda.device(self.device):  # the current device is per thread
                kernel.run  # noqa: B018  loads it
            return kernel

        def result(timeout: float | None = None) -> Any:
            """Triton asks here before each launch of a kernel that it does not have yet. Without another attempt, one
            failure, such as a full disk, would be raised by all launches of the kernel.
            """
            error = future.exception(timeout)
            if error is None:
                return Future.result(future)
            logger.warning("a kernel is compiled again, because its first compilation failed: %r", error)
            return compile(*args, **options)

        future = super().submit(compile_and_load)
        future.result = result  # type: ignore[method-assign]
        return future


def on_meta(call: Arguments, tokens: int) -> Arguments:
    """The call with meta tensors, which have a layout and no memory."""
    return call.changed(functools.partial(of_tokens, call, tokens))


# A nested function that calls itself is a reference cycle, which keeps the call's tensors until a garbage collection.
def of_tokens(call: Arguments, tokens: int, name: str, value: Any) -> Any:
    """An argument of the call, as it is in a call of so many tokens."""
    if name == "retain" and value:
        return min(tokens, rows_to_retain(call.operands.saved_columns))  # type: ignore[attr-defined]
    if isinstance(value, list):
        return [of_tokens(call, tokens, "", element) for element in value]
    if not isinstance(value, Tensor):
        return value
    shape, stride = list(value.shape), value.stride()
    if name == "retained":
        shape[0] = min(tokens, rows_to_retain(shape[1]))
    elif shape and name not in OF_CLASSES:
        shape[0] = tokens
    offset = value.data_ptr() % 16 // value.element_size()  # an address that is no multiple of 16 is another kernel
    extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride))
    return torch.empty(extent, dtype=value.dtype, device="meta").as_strided(shape, stride, offset)


def kind_of(call: Arguments) -> tuple[Hashable, ...]:
    """What the kernels depend on, except for the number of tokens. Takes 5 us, in every call."""
    values, (tensors, numbers) = call.values(), places_of(type(call))  # type: ignore[arg-type]
    for index, first in tensors:
        tensor = values[index]
        if tensor is not None:
            values[index] = tensor.dtype, tensor.shape[first:]
    for index in call.lists:
        values[index] = tuple((e.dtype, e.shape[1:]) if isinstance(e, Tensor) else e for e in values[index] or ())
    for index in numbers:
        values[index] = bool(values[index])
    return call.op, get_workspace(), *values


@functools.cache
def places_of(arguments: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """The places of tensors among the values of a call, each with its first dimension that is not tokens, and those of
    numbers that change from step to step: kernels depend on whether they are 0.
    """
    tensors, numbers = [], []
    for index, argument in enumerate(arguments.arguments):
        name = argument.name
        if index in arguments.tensor_places:
            tensors.append((index, 0 if name in OF_CLASSES else 1))
        elif argument.type == "float" or name == "retain":
            numbers.append(index)
    return tensors, numbers
