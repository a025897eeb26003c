"""Compiling ahead: before its first launch, a call compiles every kernel that it can launch for any N, in parallel.

    run the call on meta tensors, for each N of TOKENS      The launcher branches as usual. Each launch only notes which
                                                            kernel to compile.
    if a gradient is wanted, also the calls of backward     All cotangents are assumed to be there.
    threads compile the kernels                             In parallel: Triton releases the GIL in MLIR and LLVM, and
                                                            ptxas is a process. Making Triton's IR holds the GIL: 0.8
                                                            of the 16 s that 23 kernels take an H200's host. So no
                                                            thread starts before two N, 0.1 s, have named nearly all
                                                            kernels, and the IR of those that take longest is first.
    and load them                                           onto the device, if there is one
    a file in Triton's cache says that they are compiled     A later process reads the kernels from the cache.

replay.py calls it for a new kind of call; flce_ops/warmup does the same without a call.
"""

import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from ...meta import outputs
from ...meta.call import Arguments
from ...support.compile_cache import code_key
from ...support.running import running
from ...support.torch_private import UncompiledDispatchMode
from ...support.vendor import Chip, Compiling, compiling
from ...support.workspace import get_retained, get_workspace, rows_to_retain
from ..gemm.device import chip_of
from .once import wait_for_driver, wait_for_triton
from .sources import hashes, know_hashes

logger = logging.getLogger("flce_ops")

# These N give one chunk and several, few tokens and many. Nothing else that depends on N is a constant of a kernel.
# tests/kernels/test_compilations.py compares them with random N.
TOKENS = (65536, 1, *(int(128 * 2 ** (i / 2)) for i in range(23)))
FIRST = 2  # these launch nearly all kernels
ENOUGH_LAUNCHES = 300  # a call with this many launches has had chunks of every kind
# Arguments whose first dimension is classes. The first dimension of all others is tokens.
OF_CLASSES = {
    *("linear_weight", "linear_bias", "weight", "low_rank_weight", "main_grad"),
    *("teacher_weight", "teacher_bias"),
}
OF_PAIRS = {"shift", "teacher_shift"}  # (2, N)

aten = torch.ops.aten
WHERE = (aten.where.ScalarOther, aten.where.ScalarSelf)  # pointwise operators that lack torch.Tag.pointwise
EXTREMES = (aten.amax.default, aten.amin.default)
COMPARISONS = (aten.eq.Tensor, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.bitwise_not.default)
DONE = "flce_ops_compiled_ahead.json"  # name of a file in Triton's cache; it holds the hashes of sources
THREADS = 2 * len(os.sched_getaffinity(0))  # half of them wait: for the GIL, or for ptxas and gcc
# The kernels that take longest to compile: 1.7 to 0.8 s alone, with ptxas. The others take 0.1 to 0.7 s.
LONGEST = ("overflow_rows_kernel", "input_gradient_kernel", "logits_gemm_kernel", "weight_gradient_kernel")
TEXTS = "TRITON_STORE_BINARY_ONLY"  # "0": Triton's cache also gets the kernels' IR and PTX
_heads: set[Hashable] = set()  # (device, head) whose kernels are compiled; head_of() makes the keys


def compile_first() -> None:
    """Compiles the kernels of the operator that this thread runs, unless a call that differs only in N has compiled
    them.
    """
    from triton.runtime.cache import get_cache_manager

    launch, call, backward = running.launch, running.call, running.backward
    running.call = None  # cleared, because one operator may run several kinds of call
    if launch is None or call is None or torch.cuda.is_current_stream_capturing():
        return
    device = next(value.device for value in call.values() if isinstance(value, Tensor))
    head = head_of(call)
    if (device, head) in _heads:
        return
    _heads.add((device, head))
    heads = {head}

    def mark_of(head: Hashable) -> Any:
        versions = code_key(), triton.__version__, torch.__version__, chip_of(device)
        return get_cache_manager(hashlib.sha256(repr((head, versions)).encode()).hexdigest())

    def trace_all() -> None:
        trace(launch, call)
        if backward is not None:
            needs = [isinstance(value, Tensor) and value.requires_grad for value in call.values()]
            of_any = on_meta(call, max(TOKENS))
            with WithoutData(), suppress(NotImplementedError):  # what is not implemented has no kernels
                backward.call_backward(of_any, needs, outputs(of_any))  # fake kernels run, and trace
        heads.update(compiling.get().heads)

    try:
        compiled_before = mark_of(head).get_file(DONE)
        if compiled_before is not None:
            know_hashes(json.loads(Path(compiled_before).read_text()))
            wait_for_triton()
            return
        _, failed = compile_side_by_side(chip_of(device), call.op, trace_all, device)
        _heads.update((device, head) for head in heads)
        if not failed:
            with suppress(OSError):  # the cache may be read-only
                for head in heads:
                    mark_of(head).put(json.dumps(hashes()), DONE, binary=False)
    except Exception as error:  # the call continues as it would have without this
        failed = [("what is still missing", error)]
    for name, why in failed:  # if the call needs the kernel, its launch raises the error
        logger.warning("%s: %s is not compiled ahead: %s: %s", call.op, name, type(why).__name__, why)


def compile_side_by_side(
    chip: Chip, what: str, trace: Callable[[], None], device: torch.device | None = None
) -> tuple[int, list[tuple[str, Any]]]:
    """Compiles, without launching, the kernels that `trace` would launch. Its meta tensors stand for tensors on `chip`.

    Returns their number, and the names and errors of those that failed.
    """
    start, ahead = time.perf_counter(), Compiling(chip)
    kernels: list[Waiting] = ahead.kernels

    def trace_alone() -> None:
        compiling.set(ahead)
        trace()

    try:
        wait_for_driver()
        with without_texts(), ThreadPoolExecutor(THREADS) as pool:
            for ahead.tokens in (TOKENS[:FIRST], TOKENS[FIRST:]):
                before = len(kernels)
                copy_context().run(trace_alone)
                for kernel in sorted(kernels[before:], key=Waiting.place):
                    pool.submit(kernel.compile_and_load, device)
    finally:
        for kernel in kernels:
            kernel.end()
    failed = [(kernel.name, error) for kernel in kernels if (error := kernel.future.exception()) is not None]
    count, seconds = len(kernels) - len(failed), time.perf_counter() - start
    if count:
        logger.info("%d kernels of %s compiled, or read from Triton's cache, in %.1f s", count, what, seconds)
    return count, failed


@dataclass(eq=False)
class Waiting:
    """A kernel that is to be compiled. Until it is, Triton's cache of loaded kernels holds `future`, which another
    thread that launches the kernel waits for.
    """

    name: str
    compile: Callable[[], Any]  # compiles the kernel, or reads it, and puts it into `cache`
    cache: dict[Hashable, Any]  # Triton's, of the kernels of one device
    key: Hashable
    future: Future = field(default_factory=Future)

    def place(self) -> int:
        return LONGEST.index(self.name) if self.name in LONGEST else len(LONGEST)

    def compile_and_load(self, device: torch.device | None) -> None:
        """With Triton 3.6, loading a kernel also compiles its launcher in C."""
        try:
            wait_for_triton()
            kernel = self.compile()
            if device is not None:
                with torch.cuda.device(device):  # the current device is per thread
                    kernel.run  # noqa: B018  loads it
            self.future.set_result(kernel)
        except Exception as error:
            self.future.set_exception(error)

    def end(self) -> None:
        """Forgets a kernel that was not compiled or loaded, so a launch compiles it again."""
        if not self.future.done():
            self.future.set_exception(RuntimeError("compiling ahead has ended"))
        if self.future.exception() is not None:
            self.cache.pop(self.key, None)


def compile_later(jitted: Any, key: Hashable, device: int, compile: Callable[[], Any]) -> Any:
    """Notes a kernel that a traced launch asks for, and returns what stands for it."""
    jitted.ASTSource = in_turn(jitted.ASTSource)
    waiting = Waiting(jitted.__name__, compile, jitted.device_caches[device][0], key)
    compiling.get().kernels.append(waiting)
    waiting.cache[key] = stand_in = triton.FutureKernel(lambda kernel: None, waiting.future)
    return stand_in


_one_at_a_time = threading.Lock()


@functools.cache
def in_turn(source: type) -> type:
    """Triton's ASTSource, of which one makes its IR at a time: threads that share the GIL would all end late."""
    if hasattr(source, "one_at_a_time"):
        return source

    class Source(source):  # type: ignore[misc]
        one_at_a_time = _one_at_a_time

        def make_ir(self, *args: Any, **options: Any) -> Any:
            with self.one_at_a_time:
                return super().make_ir(*args, **options)

    return Source


@contextmanager
def without_texts() -> Iterator[None]:
    """Unless the user asks for them, Triton's cache gets no IR and PTX: printing them takes the GIL, and a later
    process would read them all.
    """
    with triton.knobs.compilation.scope():
        if TEXTS not in os.environ:
            triton.knobs.compilation.store_binary_only = True
        yield


def trace(launch: Callable, call: Arguments) -> None:
    ahead, head = compiling.get(), head_of(call)
    ahead.heads.setdefault(head, max(TOKENS))
    for tokens in ahead.tokens:
        if tokens > ahead.heads[head]:
            continue
        before = ahead.launches
        with WithoutData():
            launch(on_meta(call, tokens))
        if ahead.launches - before > ENOUGH_LAUNCHES:
            ahead.heads[head] = tokens


class WithoutData(UncompiledDispatchMode):
    """Runs ATen's arithmetic on meta tensors as shapes and dtypes only: torch's own meta functions import sympy and
    torch._dynamo.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in EXTREMES and len(args) == 2:  # reduces one dimension
            return args[0].select(*args[1], 0)
        if torch.Tag.pointwise not in func.tags and func not in WHERE:
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        tensors = [value for value in args if isinstance(value, Tensor)]
        largest = max(tensors, key=Tensor.dim)
        dtype = torch.bool if func in COMPARISONS else tensors[-1].dtype
        return largest.new_empty(largest.shape, dtype=dtype)


def on_meta(call: Any, tokens: int) -> Any:
    def changed(name: str, value: Any) -> Any:
        if name == "retain" and value:
            return min(tokens, rows_to_retain(call.operands.saved_columns))
        if not isinstance(value, Tensor):
            return value
        shape, stride = list(value.shape), value.stride()
        if name in OF_PAIRS:
            shape, stride = [2, tokens], (tokens, 1)
        elif name == "retained":
            shape[0] = min(tokens, rows_to_retain(shape[1]))
        elif shape and name not in OF_CLASSES:
            shape[0] = tokens
        offset = value.data_ptr() % 16 // value.element_size()
        extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride))
        return torch.empty(extent, dtype=value.dtype, device="meta").as_strided(shape, stride, offset)

    return call.changed(changed)


def head_of(call: Arguments) -> Hashable:
    """Everything that the kernels depend on, as a key that is valid in other processes, too."""
    features: list[Any] = [call.op, get_workspace(), get_retained()]
    for name, value in zip(call.index, call.values()):
        if isinstance(value, Tensor):
            shape = value.shape if name in OF_CLASSES else value.shape[1:] * (name not in OF_PAIRS)
            features.append((value.dtype, value.dim(), shape, value.data_ptr() % 16))
        elif name == "retain" or isinstance(value, float):
            features.append(bool(value))
        else:
            features.append(tuple(value) if isinstance(value, list) else value)
    return tuple(features)
