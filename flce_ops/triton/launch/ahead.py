"""Compiling ahead: every kernel that a call can launch for any N, side by side, before the first of them is launched.

    the call on "meta" tensors, for each N of TOKENS    its launcher branches as ever; in place of each launch Triton is
                                                        told of the kernel
    threads compile the kernels                         meanwhile. Triton lets go of Python's lock in MLIR and LLVM,
                                                        ptxas is a process: of the 6.1 s of a step's kernels 1.1 s, the
                                                        making of Triton's IR, is one thread's at a time
    and load them                                       onto the device, where there is one
    a file in Triton's cache says that it was done      a later process takes what it needs from the cache

replay.py asks for it where a kind of call is new; flce_ops/warmup does the same without a call.
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

from ...meta.call import Arguments
from ...support.compile_cache import code_key
from ...support.running import running
from ...support.torch_private import UncompiledDispatchMode
from ...support.vendor import Chip, Compiling, compiling
from ...support.workspace import get_retained, get_workspace, rows_to_retain
from ..gemm.device import chip_of

logger = logging.getLogger("flce_ops")

# One chunk and several, few tokens and many: what else N decides on is no constant of a kernel.
# tests/kernels/test_compilations.py compares them with random N.
TOKENS = (1, 16384, *(int(128 * 2 ** (i / 2)) for i in range(23)))  # the first two launch most of the kernels
ENOUGH_LAUNCHES = 500  # of a call that has chunks of every kind
# Arguments whose first dimension is that of the classes; those of the others is that of the tokens.
OF_CLASSES = {
    *("linear_weight", "linear_bias", "weight", "class_scale", "low_rank_weight", "main_grad"),
    *("teacher_weight", "teacher_bias"),
}
OF_PAIRS = {"shift", "teacher_shift"}  # (2, N)

aten = torch.ops.aten
WHERE = (aten.where.ScalarOther, aten.where.ScalarSelf)  # which have no such tag
EXTREMES = (aten.amax.default, aten.amin.default)
COMPARISONS = (aten.eq.Tensor, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Tensor, aten.lt.Scalar, aten.bitwise_not.default)
DONE = "flce_ops_compiled_ahead"  # a file in Triton's cache
_heads: set[Hashable] = set()  # whose kernels are compiled


def compile_first() -> None:
    """The kernels of the operator that this thread runs, unless those of a call like it but for N are compiled."""
    from triton.runtime.cache import get_cache_manager

    launch, call = running.launch, running.call
    running.call = None  # one operator may be several kinds of call
    if launch is None or call is None or torch.cuda.is_current_stream_capturing():
        return
    head = head_of(call)
    if head in _heads:
        return
    _heads.add(head)
    device = next(value.device for value in call.values() if isinstance(value, Tensor))
    try:
        versions = code_key(), triton.__version__, torch.__version__, chip_of(device)
        done = get_cache_manager(hashlib.sha256(repr((head, versions)).encode()).hexdigest())
        if done.get_file(DONE) is not None:
            return
        _, failed = compile_side_by_side(chip_of(device), call.op, lambda: trace(launch, call), device)
        if not failed:
            with suppress(OSError):  # a cache that is only read
                done.put("", DONE, binary=False)
    except Exception as error:  # the call goes on as it would have without
        failed = [("what is still missing", error)]
    for name, why in failed:  # where the call needs it, its launch raises
        logger.warning("%s: %s is not compiled ahead: %s: %s", call.op, name, type(why).__name__, why)


def compile_side_by_side(
    chip: Chip, what: str, trace: Callable[[], None], device: torch.device | None = None
) -> tuple[int, list[tuple[str, Any]]]:
    """The kernels that `trace` would launch, whose tensors on "meta" are on such a chip; none is launched.

    How many those are; names and errors of those that failed.
    """
    start, ahead = time.perf_counter(), Compiling(chip)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            # in a context of its own, where Triton's mode ends whatever happens
            copy_context().run(compile_launched, Tasks(pool, device), ahead, trace)
    finally:
        failed = [(name, future) for future, name in ahead.kernels.items() if future.kernel is None]
        for _, future in failed:
            future.finalize_compile(None)  # Triton forgets it: it is compiled again where it is launched
    count, seconds = len(ahead.kernels) - len(failed), time.perf_counter() - start
    if count:
        logger.info("%d kernels of %s compiled, or read from Triton's cache, in %.1f s", count, what, seconds)
    return count, [(name, future.future.exception()) for name, future in failed]


def compile_launched(tasks: "Tasks", ahead: Compiling, trace: Callable[[], None]) -> None:
    compiling.set(ahead)
    with triton.AsyncCompileMode(tasks, ignore_errors=True):
        trace()


class Tasks(NamedTuple):
    """What Triton gives the compiling of a kernel to."""

    pool: ThreadPoolExecutor
    device: torch.device | None

    def submit(self, compile: Callable) -> Future:
        return self.pool.submit(self.compile_and_load, compile)

    def compile_and_load(self, compile: Callable) -> Any:
        """Loading it is, for Triton 3.6, also the compiling of its launcher in C."""
        kernel = compile()
        if self.device is not None:
            with torch.cuda.device(self.device):  # which is a thread's own
                kernel.run  # noqa: B018  loads it
        return kernel


def trace(launch: Callable, call: Arguments) -> None:
    ahead, most = compiling.get(), max(TOKENS)
    for tokens in TOKENS:
        if tokens > most:
            continue
        before = ahead.launches
        with WithoutData():
            launch(on_meta(call, tokens))
        if ahead.launches - before > ENOUGH_LAUNCHES:
            most = tokens


class WithoutData(UncompiledDispatchMode):
    """ATen's arithmetic on "meta" tensors as shapes and dtypes alone: torch's own imports sympy and torch._dynamo."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in EXTREMES and len(args) == 2:  # of one dimension
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
    """All that its kernels depend on, in this process and in another."""
    features: list[Any] = [call.op, get_workspace(), get_retained()]
    for name, value in zip(call.index, call.values()):
        if isinstance(value, Tensor):
            shape = value.shape if name in OF_CLASSES else value.shape[1:] * (name not in OF_PAIRS)
            features.append((value.dtype, value.dim(), shape, value.device, value.data_ptr() % 16))
        elif name == "retain" or isinstance(value, float):
            features.append(bool(value))
        else:
            features.append(tuple(value) if isinstance(value, list) else value)
    return tuple(features)
