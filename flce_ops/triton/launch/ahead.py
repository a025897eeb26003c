"""Compiling ahead: every kernel that a call can launch for any N, side by side, before the first of them is launched.

    the call on "meta" tensors, for each N of TOKENS    its launcher branches as ever; in place of each launch Triton is
                                                        told to compile the kernel
    kernels compile in threads                          Triton lets go of Python's lock in MLIR and LLVM, ptxas is a
                                                        process
    and are loaded                                      onto the device, where there is one

replay.py asks for it where a kind of call is new; flce_ops/warmup does the same without a call.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import torch
import triton
from torch import Tensor

from flce_ops.meta.arguments import retained_columns
from flce_ops.meta.call import Arguments
from flce_ops.support.running import running
from flce_ops.support.vendor import Chip, Compiling, compiling
from flce_ops.support.workspace import get_retained, get_workspace
from flce_ops.triton.gemm.target import chip_of

logger = logging.getLogger("flce_ops")

# One chunk and several, few tokens and many: what else N decides on is no constant of a kernel.
# tests/test_compilations.py compares them with random N.
TOKENS = (1, *(int(128 * 2 ** (i / 2)) for i in range(23)))
ENOUGH_LAUNCHES = 500  # of a call that has chunks of every kind
# Arguments whose first dimension is that of the classes; those of the others is that of the tokens.
OF_CLASSES = {
    *("linear_weight", "linear_bias", "weight", "class_scale", "low_rank_weight", "main_grad"),
    *("teacher_weight", "teacher_bias"),
}
OF_PAIRS = {"shift", "teacher_shift"}  # (2, N)
ROW_MULTIPLE = 128  # rows that are retained together

_heads: set[Hashable] = set()  # whose kernels are compiled


def compile_first() -> None:
    """The kernels of the operator that this thread runs, unless those of a call like it but for N are compiled."""
    launch, call = running.launch, running.call
    running.call = None  # one operator may be several kinds of call
    if launch is None or call is None or torch.cuda.is_current_stream_capturing():
        return
    head = head_of(call)
    if head in _heads:
        return
    _heads.add(head)
    try:
        device = next(value.device for value in call.values() if isinstance(value, Tensor))
        kernels = compile_side_by_side(chip_of(device), call.op, lambda: trace(launch, call))
        load(kernels, device)
    except Exception as error:  # the call itself will tell whether one of its own kernels is at fault
        logger.warning("kernels of %s are compiled as they are launched: %s", call.op, error, exc_info=True)


def compile_side_by_side(chip: Chip, what: str, trace: Callable[[], None]) -> list[Any]:
    """The kernels that `trace` would launch, whose tensors on "meta" are on such a chip. None is launched."""
    start = time.perf_counter()
    with ThreadPoolExecutor(threads()) as pool:
        mode = triton.AsyncCompileMode(pool, ignore_errors=True)
        ahead = Compiling(chip)
        copy_context().run(traced, mode, ahead, trace)  # after an interruption Triton's mode would stay in this context
    for kernel, name in ahead.kernels.items():
        if kernel.kernel is None:
            logger.warning("%s of %s was not compiled ahead: %s", name, what, kernel.future.exception())
            kernel.finalize_compile(None)  # compiled again where it is launched
    kernels = [kernel.kernel for kernel in ahead.kernels if kernel.kernel is not None]
    if kernels:
        seconds = time.perf_counter() - start
        logger.info("%d kernels of %s compiled, or read from Triton's cache, in %.1f s", len(kernels), what, seconds)
    return kernels


def traced(mode: Any, ahead: Compiling, trace: Callable[[], None]) -> None:
    compiling.set(ahead)
    with mode:
        trace()


def trace(launch: Callable, call: Arguments) -> None:
    ahead = compiling.get()
    for tokens in TOKENS:
        before = ahead.launches
        launch(on_meta(call, tokens))
        if ahead.launches - before > ENOUGH_LAUNCHES:
            break


def on_meta(call: Any, tokens: int) -> Any:
    def changed(name: str, value: Any) -> Any:
        if name == "retain" and value:
            input, linear_weight = call.operands[:2]
            return rows_to_retain(tokens, retained_columns(linear_weight.shape[0], input.dtype))
        if not isinstance(value, Tensor):
            return value
        shape, stride = list(value.shape), value.stride()
        if name in OF_PAIRS:
            shape, stride = [2, tokens], (tokens, 1)
        elif name == "retained":
            shape[0] = rows_to_retain(tokens, shape[1])
        elif shape and name not in OF_CLASSES:
            shape[0] = tokens
        offset = value.data_ptr() % 16 // value.element_size()
        extent = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride))
        return torch.empty(extent, dtype=value.dtype, device="meta").as_strided(shape, stride, offset)

    return call.changed(changed)


def rows_to_retain(tokens: int, columns: int) -> int:
    return min(tokens, get_retained() // (2 * columns) // ROW_MULTIPLE * ROW_MULTIPLE)


def head_of(call: Arguments) -> Hashable:
    """All that its kernels depend on."""
    features: list[Any] = [type(call), get_workspace(), get_retained()]
    for name, value in zip(call.index, call.values()):
        if isinstance(value, Tensor):
            shape = value.shape if name in OF_CLASSES else value.shape[1:] * (name not in OF_PAIRS)
            features.append((value.dtype, value.dim(), shape, value.device, value.data_ptr() % 16))
        elif name == "retain" or isinstance(value, float):
            features.append(bool(value))
        else:
            features.append(tuple(value) if isinstance(value, list) else value)
    return tuple(features)


def load(kernels: list[Any], device: torch.device) -> None:
    """Onto the device, and for Triton 3.6 the compiling of each one's launcher in C."""

    def load_one(kernel: Any) -> None:
        with torch.cuda.device(device):  # which is a thread's own
            kernel.run  # noqa: B018  loads it

    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(load_one, kernels))


def threads() -> int:
    return len(os.sched_getaffinity(0))
