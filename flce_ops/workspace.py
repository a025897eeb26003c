"""How much temporary memory one call may use, and the rows of logits that fit into it.

The workspace bounds everything an operator allocates besides its results, whatever the number of tokens is. It changes
speed and the number of chunks, not the meaning of the result.
"""

from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT_WORKSPACE_BYTES = 512 << 20

# Gradients of half operands are summed over chunks in float32 where that copy is small: at most half the workspace, or
# this much. A larger one is summed in its own dtype, rounded once a chunk. (On a CPU: flce_ops/gradients.py.)
FLOAT32_SUM_BYTES = 32 << 20

# What the operators hold per token besides matrices: factors, losses, indices, about 30 vectors.
VECTOR_BYTES_PER_TOKEN = 128

_workspace_bytes = DEFAULT_WORKSPACE_BYTES


def get_workspace() -> int:
    """Bytes of temporary memory that one operator call may use."""
    return _workspace_bytes


def matrix_bytes(tokens: int) -> int:
    """The part of the workspace that is left for matrices."""
    return max(_workspace_bytes - VECTOR_BYTES_PER_TOKEN * tokens, 1)


def float32_sum_fits(elements: int) -> bool:
    return 4 * elements <= max(_workspace_bytes // 2, FLOAT32_SUM_BYTES)


def set_workspace(nbytes: int) -> None:
    """Set the bytes of temporary memory that one operator call may use (default 512 MiB).

    Read when a kernel runs, in compiled graphs too, so no recompilation follows. At least 128 rows of logits are always
    held (64 on a CPU, but for linear_kl_div), so a very small value is exceeded rather than refused. On a CPU a
    chunk takes no more than 16 MiB, unless that is fewer than 128 rows. Where a (V, D) weight gradient in float32 takes
    at most half of it or 32 MiB, half operands use one to sum over chunks, on a CPU over more than 8 of them; else that
    gradient is rounded once a chunk. A double backward has float32 sums of the weight's size on top.

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
