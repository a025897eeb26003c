"""Lists the tiles (LIVE tokens x LIVE classes) that the gradient GEMMs multiply, if they skip the other tiles.

            V, in blocks of LIVE classes                 grad_input     for each block of rows: the blocks of classes
           ┌──────┬──────┬──────┬──────┐                                that are live for its tokens
    n      │  ▓▓  │      │  ▓▓  │      │  Steps: 0 2      grad_linear_weight     for each block of classes: the blocks
           │      │  ▓▓  │      │  ▓▓  │         1 3                             of rows that are live for it; or a
           └──────┴──────┴──────┴──────┘                                         list of the only blocks to compute

The device makes the lists. The host launches the same GEMMs for any lists.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.sparse_gradient import LIVE as TILE
from ..gemm.tma import Matrix, load_tile, matrix_of
from ..launch.replay import Kernel
from ..rows.valid_tokens import ValidTokens, room_for_rows, valid_rows

# n rows of a chunk, V vocabulary, B blocks of a GEMM's output, K blocks of its inner dimension

LIVE = tl.constexpr(TILE)


class Steps(NamedTuple):
    """For each block of a GEMM's output, the blocks of the inner dimension that the GEMM multiplies. If `number` is
    None, it multiplies all blocks.

    With strides of 0, Steps instead lists the blocks of the output that are computed. The other blocks stay unchanged.
    """

    number: Tensor | None = None  # (B,) int32; with a stride of 0 the same number for all blocks
    which: Tensor | None = None  # (B, K + 1) int32, ascending; the number after the last is loaded but not used
    stride_number: int = 0
    stride_which: int = 0


EVERY_STEP = Steps()


class ComparedRows(NamedTuple):
    """Rows of E whose |p - onehot| is compared with a threshold. Passed to kernels as one argument."""

    exponentials: Matrix  # (n, V), with the targets' entries in place
    row_sum: Tensor  # (n,)
    valid_tokens: ValidTokens
    threshold: float
    V: int

    @property
    def n(self) -> int:
        return self.exponentials.pointer.shape[0]


def compared_rows(exponentials: Tensor, row_sum: Tensor, valid_tokens: ValidTokens, threshold: float) -> ComparedRows:
    return ComparedRows(matrix_of(exponentials), row_sum, valid_tokens, threshold, exponentials.shape[1])


@triton.jit
def number_of_steps(steps, start, every, BLOCK_K: tl.constexpr):
    """The number of main-loop steps for the block of the output that begins at `start`."""
    if steps.number is None:
        return every
    else:
        return tl.load(steps.number + start // LIVE * steps.stride_number) * (LIVE // BLOCK_K)


@triton.jit
def step_at(steps, start, k, BLOCK_K: tl.constexpr):
    """The block of the k-th step. A loop loads the number for its next iteration. If it loaded the number for the
    current iteration, the compiler would not pipeline the loop.
    """
    SPLIT: tl.constexpr = LIVE // BLOCK_K
    if steps.number is None:
        return k
    else:
        k = tl.full((), k, tl.int32)
        return tl.load(steps.which + start // LIVE * steps.stride_which + k // SPLIT) * SPLIT + k % SPLIT


@Kernel
def mark_tiles_kernel(
    compared,  # ComparedRows
    column_ptr,  # (n,) int64, the targets' columns
    live_ptr,  # (row blocks, class blocks) uint8, out
    n,
    stride_live,
    ROWS: tl.constexpr,
):
    """A tile is live if it holds a token's target or an entry with |p - onehot| >= threshold. nan counts as such an
    entry.
    """
    cols = tl.program_id(0) * LIVE + tl.arange(0, LIVE)
    count = valid_rows(compared.valid_tokens, n)
    rows = tl.program_id(1) * LIVE + tl.arange(0, LIVE)
    column = tl.load(column_ptr + rows, mask=rows < count, other=-1)
    holds_target = ((column >= 0) & (column // LIVE == tl.program_id(0))).to(tl.int32)
    live = tl.zeros((ROWS, LIVE), tl.int32)
    for start in tl.static_range(0, LIVE, ROWS):
        row = tl.program_id(1) * LIVE + start + tl.arange(0, ROWS)
        limit = compared.threshold * tl.load(compared.row_sum + row, mask=row < count, other=1.0)
        e = load_tile(compared.exponentials, row, cols, row < count, cols < compared.V).to(tl.float32)
        live |= 1 - (tl.abs(e) < limit[:, None]).to(tl.int32)
    found = tl.maximum(tl.max(tl.max(live, 1), 0), tl.max(holds_target, 0))
    tl.store(live_ptr + tl.program_id(1) * stride_live + tl.program_id(0), found.to(tl.uint8))


@Kernel
def list_live_kernel(
    live_ptr,  # (B, K) uint8, read by strides
    steps,  # Steps, out
    K,
    stride_b,
    stride_k,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    count = 0
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = tl.load(live_ptr + block * stride_b + k * stride_k, mask=k < K, other=0).to(tl.int32)
        place = count + tl.cumsum(live, 0) - live
        tl.store(steps.which + block * steps.stride_which + place, k, mask=live > 0)
        count += tl.sum(live, 0)
    tl.store(steps.number + block * steps.stride_number, count)


def launch_live_tiles(compared: ComparedRows, column: Tensor) -> tuple[Steps, Steps]:
    """The steps of grad_input and of grad_linear_weight."""
    rows, classes = triton.cdiv(compared.n, TILE), triton.cdiv(compared.V, TILE)
    live = column.new_empty(rows, classes, dtype=torch.uint8)
    mark_tiles_kernel[(classes, rows)](compared, column, live, compared.n, live.stride(0), ROWS=32, num_warps=4)
    return list_live(live, 0), list_live(live, 1)


def list_live(live: Tensor, of: int) -> Steps:
    """The live tiles of each row (of=0) or column (of=1) of a matrix of tiles."""
    blocks, across = live.shape[of], live.shape[1 - of]
    index = live.new_empty(blocks, room_for_rows(across + 1), dtype=torch.int32)
    steps = Steps(live.new_empty(blocks, dtype=torch.int32), index, 1, index.stride(0))
    list_live_kernel[(blocks,)](live, steps, across, live.stride(of), live.stride(1 - of), BLOCK=1024)
    return steps
