"""Which implementation ran: kept for `flce_ops.last_path()` and logged once per distinct answer."""

import logging
from dataclasses import dataclass

logger = logging.getLogger("flce_ops")


@dataclass(frozen=True)
class Path:
    """What the last kernel call of this process did, in any thread: on CUDA backward runs in one of autograd's."""

    op: str  # "linear_cross_entropy_with_grad", ...
    implementation: str  # "triton" | "aten"
    reason: str  # why this implementation was taken
    rows_per_chunk: int  # rows of logits held at a time
    chunks: int


_last: Path | None = None
_logged: set[tuple[str, str, str]] = set()


def record_path(path: Path) -> None:
    global _last
    _last = path
    key = (path.op, path.implementation, path.reason)
    if key not in _logged:
        _logged.add(key)
        logger.info("%s runs on %s (%s): %d chunks of %d rows", *key, path.chunks, path.rows_per_chunk)


def last_path() -> Path | None:
    """The implementation, the reason and the chunking of the last kernel call, or None before the first one.

    Backward kernels count as calls. The same facts go to the logger "flce_ops" at level INFO, once per distinct answer.
    """
    return _last
