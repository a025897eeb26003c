"""Which path ran: kept for `flce_ops.last_path()`, put into words when somebody asks.

The table of paths (ops/paths.py) chose it and says why, the kernel says how it cut the rows and what else is worth a
note. The logger "flce_ops" has each distinct answer once, at level INFO.
"""

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

logger = logging.getLogger("flce_ops")


@dataclass(frozen=True)
class Path:
    """What the last kernel call of this process did, in any thread: on CUDA backward runs in one of autograd's."""

    op: str  # "linear_cross_entropy_with_grad", ...
    implementation: str  # "triton" | "aten"
    reason: str  # why this implementation was taken, and notes on how it ran
    rows_per_chunk: int  # rows of logits held at a time
    chunks: int


class Choice(Protocol):
    """What a table of paths says of a call."""

    @property
    def op(self) -> str: ...
    @property
    def implementation(self) -> str: ...
    def reason(self) -> str: ...


class NoChoice:
    """Of a kernel that is called by itself, as tests do."""

    op = implementation = ""

    def reason(self) -> str:
        return "called by itself"


class Run:
    """A call of a kernel. It holds no tensor."""

    def __init__(self, choice: Choice, rows_per_chunk: int, chunks: int, notes: tuple[str, ...]) -> None:
        self.choice, self.rows_per_chunk, self.chunks, self.notes = choice, rows_per_chunk, chunks, notes

    @cached_property
    def path(self) -> Path:
        reason = ", ".join((self.choice.reason(), *self.notes))
        return Path(self.choice.op, self.choice.implementation, reason, self.rows_per_chunk, self.chunks)


_last: Run | None = None
_logged: set[tuple[str, str, str]] = set()


def record_run(call: Any, rows_per_chunk: int, chunks: int, *notes: str) -> None:
    """Of `call`, Arguments of flce_ops/meta, which know the choice."""
    global _last
    _last = run = Run(call.choice, rows_per_chunk, chunks, call.notes + notes)
    if logger.isEnabledFor(logging.INFO):
        key = (run.path.op, run.path.implementation, run.path.reason)
        if key not in _logged:
            _logged.add(key)
            logger.info("%s runs on %s (%s): %d chunks of %d rows", *key, chunks, rows_per_chunk)


def last_path() -> Path | None:
    """The implementation, the reason and the chunking of the last kernel call, or None before the first one.

    Backward kernels count as calls. The same facts go to the logger "flce_ops" at level INFO, once per distinct answer.
    """
    last = _last
    return None if last is None else last.path
