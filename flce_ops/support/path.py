"""Which path ran: stored for `flce_ops.last_path()`, which makes a text of it when it is called.

In a table of paths (ops/paths.py) the first row whose conditions all hold is chosen, and tells the reason. The kernel
adds how it chunked the rows, and notes. The logger "flce_ops" reports each distinct answer once, at level INFO.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import device_name
from .workspace import temporary

logger = logging.getLogger("flce_ops")


@dataclass(frozen=True)
class Path:
    """What the last kernel call of this process did. The call may have run in another thread: on CUDA, backward runs in
    autograd's threads.

    Attributes:
        op: name of the operator, as "linear_cross_entropy_with_grad".
        implementation: "triton" or "aten".
        reason: why this implementation was taken, and notes on how it ran.
        rows_per_chunk: rows of logits held at a time.
        chunks: how many chunks there were.
        workspace: "auto", or the bytes of temporary memory that were set. With "auto", rows_per_chunk is what it chose.
    """

    op: str
    implementation: str
    reason: str
    rows_per_chunk: int
    chunks: int
    workspace: int | str = "auto"


class Condition(NamedTuple):
    name: str  # completes "expects ..."
    holds: Callable[[Any], bool]


class PathRow(NamedTuple):
    """A row of a table of paths. Its conditions read the facts of a call."""

    name: str
    conditions: tuple[Condition, ...]
    kernel: str = ""  # "module:function"

    def ruled_out_by(self, facts: Any) -> list[str]:
        return [condition.name for condition in self.conditions if not condition.holds(facts)]


def choose(paths: tuple[PathRow, ...], facts: Any) -> PathRow:
    for path in paths:
        if all(condition.holds(facts) for condition in path.conditions):
            return path
    raise AssertionError("the last path of a table has no condition")


class Choice(NamedTuple):
    """What a table of paths chose for a call. `path` is None for a kernel that is called directly, as tests do."""

    op: str = ""
    paths: tuple[PathRow, ...] = ()
    path: PathRow | None = None  # the chosen row of the table
    facts: Any = None  # device, dtype and the other facts that conditions read

    def reason(self) -> str:
        """The device and dtype of the tensors, and which conditions rule out the earlier paths of the table."""
        if self.path is None:
            return "called by itself"
        before = self.paths[: self.paths.index(self.path)]
        ruled_out = "; ".join(f"{path.name} expects {', '.join(path.ruled_out_by(self.facts))}" for path in before)
        tensors = f"{device_name(self.facts.device)} tensors in {self.facts.dtype}"
        return f"{tensors} ({ruled_out})" if ruled_out else tensors


# Describes the last call of a kernel: its choice, rows of a chunk, number of chunks, notes. last_path() replaces it by
# a Path.
_last: tuple[Choice, int, int, tuple[str, ...], int] | Path | None = None
_logged: set[tuple[str, str, str]] = set()


def record_run(call: Any, rows_per_chunk: int, chunks: int, *notes: str) -> None:
    """Records a run of `call`, an Arguments of flce_ops/meta that knows its choice."""
    global _last
    youngest = temporary.blocks[-1:]  # temporary.get(), without a call: this runs in every step
    workspace = youngest[0].nbytes if youngest else temporary.nbytes
    _last = (call.choice, rows_per_chunk, chunks, call.notes + notes, workspace)
    path = last_path() if logger.isEnabledFor(logging.INFO) else None
    if path is not None:
        key = (path.op, path.implementation, path.reason)
        if key not in _logged:
            _logged.add(key)
            logger.info("%s runs on %s (%s): %d chunks of %d rows", *key, chunks, rows_per_chunk)


def last_path() -> Path | None:
    """Which implementation the last kernel call took, why, and in how many chunks; None before the first call.

    Backward kernels count as calls. The logger "flce_ops" has the same at level INFO, once for each distinct answer.
    """
    global _last
    last = _last
    if isinstance(last, tuple):
        choice, rows_per_chunk, chunks, notes, workspace = last
        reason = ", ".join((choice.reason(), *notes))
        name = choice.path.name if choice.path else ""
        _last = last = Path(choice.op, name, reason, rows_per_chunk, chunks, workspace or "auto")
    return last
