"""How much temporary memory one call may use, and the rows of logits that fit into it.

The workspace bounds everything an operator allocates besides its results, whatever the number of tokens is. It changes
speed and the number of chunks, not the meaning of the result.
"""

from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT_WORKSPACE_BYTES = 512 << 20

_workspace_bytes = DEFAULT_WORKSPACE_BYTES


def get_workspace() -> int:
    """Bytes of temporary memory that one operator call may use."""
    return _workspace_bytes


def set_workspace(nbytes: int) -> None:
    """Set the bytes of temporary memory that one operator call may use (default 512 MiB).

    Read when a kernel runs, in compiled graphs too, so no recompilation follows. One row of logits is always held, and
    the Triton path never takes fewer than 128 rows, so a very small value is exceeded rather than refused.

    Raises:
        ValueError: `nbytes` is not a positive integer.
    """
    global _workspace_bytes
    if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0:
        raise ValueError(f"set_workspace: expected a positive number of bytes, got {nbytes!r}")
    _workspace_bytes = nbytes


@contextmanager
def workspace(nbytes: int) -> Iterator[None]:
    """`set_workspace(nbytes)` for the calls (forward and backward) made inside the `with` block, in every thread."""
    previous = get_workspace()
    set_workspace(nbytes)
    try:
        yield
    finally:
        set_workspace(previous)
