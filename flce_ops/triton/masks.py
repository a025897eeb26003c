"""A mask for a block from a condition that holds for all of it or for nothing."""

import triton
import triton.language as tl


@triton.jit
def everywhere(condition, like):
    """The condition, a scalar, for each place of the block `like`. Triton's interpreter would broadcast the condition
    itself as integers, which are no mask since Triton 3.9.
    """
    return tl.full(like.shape, condition.to(tl.int32), tl.int32) > 0
