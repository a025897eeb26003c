"""How many tokens count, and whether all of those are in range: where no kernel walks the kept ones (kept_tokens.py).

At 16384 tokens the order of kept_tokens.py, a running sum of four rounds, would take a fiftieth of a step's time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.replay import Kernel

# N tokens


class Count(NamedTuple):
    """One argument of a kernel, as Kept."""

    total: Tensor  # () int32, tokens that are not ignored


@Kernel
@triton.jit
def count_tokens_kernel(
    target_ptr,  # (N,)
    total_ptr,  # () int32, out
    in_range_ptr,  # () bool, out
    N,
    ignore_index,
    num_classes,
    BLOCK: tl.constexpr,
):
    """One program."""
    kept = tl.zeros((BLOCK,), tl.int32)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + i, mask=i < N, other=0).to(tl.int64)
        keep = (target != ignore_index) & (i < N)
        kept += keep.to(tl.int32)
        wrong |= (keep & ((target < 0) | (target >= num_classes))).to(tl.int32)
    tl.store(total_ptr, tl.sum(kept, 0))
    tl.store(in_range_ptr, tl.max(wrong, 0) == 0)


def count_tokens(target: Tensor, ignore_index: int, num_classes: int, in_range: Tensor) -> Count:
    total = target.new_empty((), dtype=torch.int32)
    tokens = target.shape[0]
    count_tokens_kernel[(1,)](target, total, in_range, tokens, ignore_index, num_classes, BLOCK=8192, num_warps=16)
    return Count(total)
