"""Which blocks of LIVE classes a GEMM visits: all, or those that a list on the device names.

A sparse gradient makes the gradient of some blocks of classes by GEMMs (sparse/sparse_or_dense.py). The weight gradient
then has only these blocks of its output, and the input gradient multiplies only these blocks of E. The host launches
the same GEMMs for any list.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# B blocks of classes

LIVE = tl.constexpr(128)  # classes of a block


class ClassBlocks(NamedTuple):
    """The blocks that a GEMM visits. If `number` is None, it visits all blocks."""

    number: Tensor | None = None  # () int32
    which: Tensor | None = None  # (B + 1,) int32, ascending; the number after the last is loaded but not used


EVERY_BLOCK = ClassBlocks()


@triton.jit
def number_of_steps(blocks, every, BLOCK: tl.constexpr):
    """The number of steps of BLOCK classes each, BLOCK <= LIVE, of a loop over the blocks."""
    if blocks.number is None:
        return every
    else:
        return tl.load(blocks.number) * (LIVE // BLOCK)


@triton.jit
def step_at(blocks, k, BLOCK: tl.constexpr):
    """The place of the k-th step, in units of BLOCK classes. A loop loads the place of its next iteration. If it loaded
    the place of the current iteration, the compiler would not pipeline the loop.
    """
    SPLIT: tl.constexpr = LIVE // BLOCK
    if blocks.number is None:
        return k
    else:
        k = tl.full((), k, tl.int32)
        return tl.load(blocks.which + k // SPLIT) * SPLIT + k % SPLIT
