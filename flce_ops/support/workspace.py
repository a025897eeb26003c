"""How much memory a call may use beside its results: temporary memory, and logits saved from forward to backward. Also
gradients_in_backward(), a block in which losses save logits instead of gradients.

The workspace bounds everything that an operator allocates besides its results, for any number of tokens. It changes the
speed and the number of chunks, not the meaning of the result. Saved logits come on top, between a forward operator and
its backward operator.

Each setting has one value for all threads. On CUDA, backward runs in autograd's threads, which inherit nothing from the
thread that entered a block:

    set_workspace(a)                      a
        thread 1: with workspace(b)       b
            thread 2: with workspace(c)   c, in thread 1 too
        thread 1 leaves its block         c
            thread 2 leaves its block     a

The latest of set_workspace and the open blocks decides. Leaving a block removes only that block.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, Literal

import torch

# What "auto", the default, stands for: so many bytes, or more if DEFAULT_ROWS rows of a head's logits need more.
AUTO = 0  # how a Budget holds "auto"
AUTO_BYTES = 512 << 20

# Rows of logits that a chunk of a one-pass step or of a backward step in Triton holds at least, unless there are fewer
# tokens: DEFAULT_ROWS with "auto", LEAST_ROWS with a number of bytes. Each chunk adds to all of
# grad_linear_weight. With 256000 classes the default is 1 GiB instead of 512 MiB, and saves half of these additions.
# Fewer than 512 rows take twice the three GEMMs' time.
DEFAULT_ROWS = 2048
LEAST_ROWS = 512

# The default for saved logits, in workspaces: 1 GiB. It holds 4096 tokens of 128256 classes. At D = 4096 this is no
# more than a scalar loss keeps between forward and backward: its gradients, D (N + V) 16-bit numbers.
SAVED_WORKSPACES = 2

# The ATen kernels sum gradients of 16-bit operands over chunks in float32 if that sum is small: at most half the
# workspace, or this many bytes. A larger sum stays in the operands' dtype and is rounded after each chunk
# (flce_ops/aten/gradients.py).
FLOAT32_SUM_BYTES = 32 << 20

# On a CPU chunks stay below the workspace, since larger ones gain little: a step of 2048x512x32000 in bfloat16 on two
# cores takes 0.57 s with chunks of 256 rows, 0.61 with 128, 0.69 with 64, 0.89 with 32. In float32 it takes 1.21, 1.37,
# 1.72 and 2.4 s.
CPU_CHUNK_BYTES = 16 << 20
CPU_ROWS = 128

# Fewer bytes than this cause a warning, because the user probably meant MiB.
SUSPICIOUS_BYTES = 32 << 10

# What operators hold for each token besides matrices: factors, losses, indices, about 30 vectors.
VECTOR_BYTES_PER_TOKEN = 128
ROW_MULTIPLE = 128  # rows of the largest tile of a kernel; logits are saved in multiples of it


class Block:
    """One `with workspace(...)` block that has been entered. Blocks of one size are distinguished by identity."""

    def __init__(self, nbytes: int | None) -> None:
        self.nbytes = nbytes


class Budget:
    """A number of bytes: that of the youngest open block that names one, otherwise the one that was set."""

    def __init__(self, nbytes: int | None) -> None:
        self.nbytes = nbytes
        # Blocks entered since the last `set` and not left, the youngest last. Each change is one list operation, which
        # is atomic. A lock could deadlock: the block of an abandoned generator is left when the generator is
        # garbage-collected, which can happen at any allocation, also while this thread holds the lock.
        self.blocks: list[Block] = []

    def get(self) -> Any:
        """The bytes, or None if none are set."""
        youngest = self.blocks[-1:]
        return youngest[0].nbytes if youngest else self.nbytes

    def set(self, nbytes: int | None) -> None:
        self.nbytes = nbytes
        self.blocks.clear()

    @contextmanager
    def block(self, nbytes: int | None) -> Iterator[None]:
        """A block. Without bytes it changes nothing."""
        block = Block(nbytes)
        if nbytes is not None:
            self.blocks.append(block)
        try:
            yield
        finally:
            with suppress(ValueError):  # a later `set` has removed it
                self.blocks.remove(block)


temporary = Budget(AUTO)
_retained = Budget(None)
_in_backward = Budget(None)  # any number: the block gradients_in_backward() is open


# Bytes already taken by the call that runs in this thread.
_taken = threading.local()


def get_workspace() -> int:
    """Bytes of temporary memory that one operator call may use, minus those that this thread's call has reserved.

    With "auto" these are 512 MiB. A kernel then takes more if 2048 rows of a head's logits need more.
    """
    youngest = temporary.blocks[-1:]
    given = youngest[0].nbytes if youngest else temporary.nbytes
    return (given or AUTO_BYTES) - getattr(_taken, "nbytes", 0)


def workspace_setting() -> int | str:
    """The bytes that were set, or "auto"."""
    return temporary.get() or "auto"


def least_rows() -> int:
    """Rows of logits that are held at a time even if the workspace is too small for them."""
    return DEFAULT_ROWS if temporary.get() == AUTO else LEAST_ROWS


def get_retained() -> int:
    """Bytes of logits that a forward operator may save for backward."""
    retained = _retained.get()
    return SAVED_WORKSPACES * get_workspace() if retained is None else retained


def rows_to_retain(columns: int) -> int:
    """How many rows of `columns` 16-bit logits get_retained() holds, in whole tiles of rows."""
    return get_retained() // (2 * columns) // ROW_MULTIPLE * ROW_MULTIPLE


@contextmanager
def reserved(nbytes: int) -> Iterator[None]:
    """Reserves a part of the workspace for this thread's operator call. Calls inside the block leave it free."""
    before = getattr(_taken, "nbytes", 0)
    _taken.nbytes = before + nbytes
    try:
        yield
    finally:
        _taken.nbytes = before


def matrix_bytes(tokens: int, per_token: int = VECTOR_BYTES_PER_TOKEN) -> int:
    """The part of the workspace that is left for matrices."""
    return max(get_workspace() - per_token * tokens, 1)


def step_bytes(rows: int, row_bytes: int, device: str = "cuda") -> int:
    """Temporary memory of a step over `rows` rows of logits: the formula of `python -m flce_ops.plan`, and what memory
    estimators see.
    """
    nbytes, least = get_workspace(), least_rows()
    if device == "cpu":
        nbytes, least = min(nbytes, CPU_CHUNK_BYTES), CPU_ROWS
    return min(rows * row_bytes, max(nbytes, least * row_bytes))


def set_workspace(nbytes: float | Literal["auto"] | None = None, *, retained: float | None = None) -> None:
    """Set the bytes of temporary memory that one operator call may use, and those of logits that may wait for backward
    (default: twice as many bytes).

    The values hold in all threads, from now on: inside `with workspace(...)` blocks that are open, too, and after these
    are left. An argument that is not given stays as it is. In a function that is being compiled the call is a graph
    break.

    Args:
        nbytes: temporary memory of one call. "auto", the default, is 512 MiB, or 2048 rows of logits where these are
            more; `last_path().rows_per_chunk` tells what a call took. Kernels read the value when they run, in compiled
            graphs too, so nothing is compiled again. Triton's kernels always hold at least 512 rows of logits, of both
            models together in linear_kl_div, and ATen 128 (64 on a CPU), so a very small value is exceeded rather than
            refused. On a CPU a chunk takes no more than 16 MiB, unless that is fewer than 128 rows. The ATen kernels
            sum the weight's gradient of 16-bit operands over chunks in float32 if that (V, D) sum takes at most half of
            nbytes or 32 MiB, on a CPU over more than 8 chunks. The float32 sums of a double backward come on top.
        retained: bytes of saved logits, on top of nbytes. Per-token results (reduction="none", linear_log_probs), a
            scalar loss in float16 and one under gradients_in_backward() save the logits of as many tokens as fit, two
            bytes a logit of 16-bit operands: 3 GEMM passes for these tokens instead of 4. 0 saves none. A compiled
            graph has the value with which it was traced.

    Raises:
        ValueError: `nbytes` is neither "auto" nor a positive whole number (1e9 is one), or `retained` is negative.
        RuntimeError: in a function that is compiled with fullgraph=True.
    """
    nbytes, retained = checked_bytes("set_workspace", nbytes, retained)
    if nbytes is not None:
        temporary.set(nbytes)
    if retained is not None:
        _retained.set(retained)


@contextmanager
def workspace(nbytes: float | Literal["auto"] | None = None, *, retained: float | None = None) -> Iterator[None]:
    """`set_workspace(...)` for the calls (forward and backward) made inside the `with` block, in every thread.

    If several blocks are open, nested or in several threads, the one entered last decides, in all threads. When all
    blocks are left, in whatever order, the value of `set_workspace` is back.

    Raises:
        ValueError: as set_workspace.
    """
    nbytes, retained = checked_bytes("workspace", nbytes, retained)
    with temporary.block(nbytes), _retained.block(retained):
        yield


@contextmanager
def gradients_in_backward() -> Iterator[None]:
    """Scalar losses of a head computed inside the `with` block, in every thread, leave their gradients to backward, as
    losses of `reduction="none"` do.

        with flce_ops.gradients_in_backward():
            schedule.step(tokens, target=target)

    This is for zero-bubble pipelines (`ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`, `ScheduleDualPipeV`).
    Usually a scalar loss makes both gradients in forward, so a later backward has no GEMM to fill a bubble with. Inside
    the block forward runs 1 GEMM pass and saves the logits of as many tokens as `set_workspace(retained=...)` allows.
    Backward runs one pass for each gradient that is asked for: input's first, linear_weight's later. For tokens whose
    logits are not saved each backward runs a further pass, and linear_kl_div, which saves no logits, runs two.

    The values are those of the loss outside the block, up to rounding. A compiled graph keeps the choice with which it
    was traced.

    Raises:
        RuntimeError: in a function that is compiled with fullgraph=True.
    """
    refuse_in_a_graph("gradients_in_backward")
    with _in_backward.block(1):
        yield


def gradients_are_left_to_backward() -> bool:
    return _in_backward.get() is not None


def refuse_in_a_graph(function: str) -> None:
    if torch.compiler.is_dynamo_compiling():  # otherwise the graph would run with the value that holds outside
        raise RuntimeError(f"{function}: a compiled graph cannot hold it; call it outside the compiled function")


def checked_bytes(function: str, nbytes: float | str | None, retained: float | None) -> tuple[int | None, int | None]:
    refuse_in_a_graph(function)
    if nbytes == "auto":
        nbytes = AUTO
    elif nbytes is not None or retained is None:
        nbytes = whole_number(nbytes, 1, f'{function}: expected "auto" or a positive number of bytes')
    if retained is not None:
        retained = whole_number(retained, 0, f"{function}: expected retained to be a number of bytes")
    for given in (nbytes, retained):
        if given and given < SUSPICIOUS_BYTES:
            warnings.warn(
                f"{function}: {given} bytes hold no row of a usual head's logits; for {given} MiB pass {given} << 20",
                stacklevel=3,
            )
    return nbytes, retained


def whole_number(value: float | str | None, least: int, expected: str) -> int:
    """`value` as an integer: 1e9 and numpy's integers are whole numbers, too."""
    if not isinstance(value, Real) or isinstance(value, bool) or value % 1 != 0 or value < least:  # inf % 1 is nan
        raise ValueError(f"{expected}, a whole one such as 10**9 or 1 << 30, got {value!r}")
    return int(value)
