"""Compiling ahead: before its first launch, a call compiles every kernel that it can launch for any N, in parallel.

    run the call on meta tensors, for each N of TOKENS      The launcher branches as usual. Each launch only tells
                                                            Triton which kernel to compile.
    if a gradient is wanted, also the calls of backward     All cotangents are assumed to be there.
    threads compile the kernels                             In parallel: Triton releases the GIL in MLIR and LLVM, and
                                                            ptxas is a process. Making Triton's IR holds the GIL: 0.8
                                                            of the 16 s that 23 kernels take an H200's host.
    and load them                                           onto the device, if there is one
    a file in Triton's cache says that they are compiled     a later process reads the kernels from the cache

replay.py calls it for a new kind of call; flce_ops/warmup does the same without a call.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple

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
from .once import wait_for_triton

logger = logging.getLogger("flce_ops")

# These N give one chunk and several, few tokens and many. Nothing else that depends on N is a constant of a kernel.
# tests/kernels/test_compilations.py compares them with random N.
TOKENS = (65536, 1, *(int(128 * 2 ** (i / 2)) for i in range(23)))
FIRST = 2  # these launch most of the kernels, so they are traced first, in forward and in backward
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
DONE = "flce_ops_compiled_ahead"  # name of a file in Triton's cache
THREADS = 2 * len(os.sched_getaffinity(0))  # half of them wait: for the GIL, or for ptxas and gcc
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
            with WithoutData():
                backward.call_backward(of_any, needs, outputs(of_any))  # fake kernels run, and trace
        heads.update(compiling.get().heads)

    try:
        compiled_before = mark_of(head).get_file(DONE) is not None
        wait_for_triton()  # until here Triton's threads ran beside this one
        if compiled_before:
            return
        _, failed = compile_side_by_side(chip_of(device), call.op, trace_all, device)
        _heads.update((device, head) for head in heads)
        if not failed:
            with suppress(OSError):  # the cache may be read-only
                for head in heads:
                    mark_of(head).put("", DONE, binary=False)
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
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            # in a context of its own, so that Triton's mode ends even after an error
            copy_context().run(compile_launched, Tasks(pool, device), ahead, trace)
    finally:
        failed = [(name, future) for future, name in ahead.kernels.items() if future.kernel is None]
        for _, future in failed:
            future.finalize_compile(None)  # removes the kernel from Triton's cache, so a launch compiles it again
    count, seconds = len(ahead.kernels) - len(failed), time.perf_counter() - start
    if count:
        logger.info("%d kernels of %s compiled, or read from Triton's cache, in %.1f s", count, what, seconds)
    return count, [(name, future.future.exception()) for name, future in failed]


def compile_launched(tasks: "Tasks", ahead: Compiling, trace: Callable[[], None]) -> None:
    compiling.set(ahead)
    with triton.AsyncCompileMode(tasks, ignore_errors=True):
        for ahead.tokens in (TOKENS[:FIRST], TOKENS[FIRST:]):
            trace()


class Tasks(NamedTuple):
    """The executor that Triton's AsyncCompileMode submits compilations to."""

    pool: ThreadPoolExecutor
    device: torch.device | None

    def submit(self, compile: Callable) -> Future:
        return self.pool.submit(self.compile_and_load, compile)

    def compile_and_load(self, compile: Callable) -> Any:
        """With Triton 3.6, loading a kernel also compiles its launcher in C."""
        kernel = compile()
        if self.device is not None:
            with torch.cuda.device(self.device):  # the current device is per thread
                kernel.run  # noqa: B018  loads it
        return kernel


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
        elif name == "offsets":
            shape[0] = tokens + 1
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
