"""Runs tests in a fork of this process, which has imported torch, Triton and pytest: that takes seconds once."""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.testing._internal.common_utils",
    "triton",
    "numpy",
    "pytest",
    "hypothesis",
)


CHECKOUT = str(Path(__file__).resolve().parents[2])
# A limit counts a process's own CPU seconds, because load changes seconds on the clock. A process that waits forever
# uses none, so it ends after WAITING times the limit on the clock.
WAITING = 6.0


def prepare() -> None:
    """Before torch is imported. No GPU: kernels run in Triton's interpreter."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1"
    )
    os.environ.setdefault("FLCE_TEST_SEED", "20261121")
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def call(function: Callable[..., Any], *arguments: Any, root: Path, log: Path, seconds: float, left: float) -> Any:
    """`function(*arguments)` in a process of its own, whose folder and first path is `root`; None for no answer.

    What it returns is JSON. All that it started ends with it. TimeoutError: after `seconds` of its CPU time, after
    WAITING times as many on the clock, or after `left` on the clock.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (max(1, int(seconds)), max(1, int(seconds)) + 5))  # SIGXCPU first
            os.close(reading)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(root)
            sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", CHECKOUT))]
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:1] + [path for path in sys.path[1:] if path in named])
            answer = json.dumps(function(*arguments)).encode() + b"\n"
            while answer:
                answer = answer[os.write(writing, answer) :]
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    try:
        answer = _read(reading, time.monotonic() + min(WAITING * seconds, left))
    finally:
        os.close(reading)
        for end in (os.killpg, os.kill):  # the second where it has not reached setsid
            with contextlib.suppress(ProcessLookupError):
                end(child, signal.SIGKILL)
        _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGXCPU:
        raise TimeoutError(f"{seconds} CPU seconds")
    return answer


def _read(pipe: int, deadline: float) -> Any:
    answer = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([pipe], [], [], left)
        if not ready:
            break
        part = os.read(pipe, 1 << 16)
        answer += part
        if answer.endswith(b"\n"):
            return json.loads(answer)
        if not part:  # it died
            return None
    raise TimeoutError("no answer")
