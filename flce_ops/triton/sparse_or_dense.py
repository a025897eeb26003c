"""Whether lists or GEMMs make a step's gradients, by the length of its first lists: decided on the device.

A gather reads 2 D bytes an entry from the L2, at 8 TB/s on an H200; a GEMM makes a row of grad_input in 2 V D
operations, at 700 TFLOP/s: as long as V / 87 entries. Measured the two ways are equal at V / 85 (8192x4096x128256) and
V / 105 (8192x1024x50304).

The first 128 kept tokens decide for all, so chunks do not. Entries that are to be dropped are dropped, whatever it
takes.
"""

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.sparse_gradient import SparseGradient
from flce_ops.triton.kept_tokens import Kept
from flce_ops.triton.replay import Kernel
from flce_ops.triton.sparse_lists import Lists

# n rows of the first chunk, V vocabulary

CLASSES_PER_ENTRY = 96  # where lists have more than one entry for so many classes, GEMMs are faster
DECIDING = 128  # tokens: the least chunk has so many


@Kernel
@triton.jit
def sparse_or_dense_kernel(
    count_ptr,  # (n,) of lists; 0 after, where the gradient is dense
    kept_total_ptr,  # ()
    sparse_total_ptr,  # () int32, out: the same number in one
    dense_total_ptr,  # () int32, out: of these two, 0 in the other
    n,
    most,  # entries a list, in the mean
    BLOCK: tl.constexpr,
):
    total = tl.load(kept_total_ptr)
    i = tl.arange(0, BLOCK)
    seen = tl.minimum(tl.minimum(total, n), BLOCK)
    entries = tl.sum(tl.load(count_ptr + i, mask=i < seen, other=0), 0)
    dense = entries > most * seen
    tl.store(sparse_total_ptr, tl.where(dense, 0, total))
    tl.store(dense_total_ptr, tl.where(dense, total, 0))
    tl.debug_barrier()  # all have read
    for start in range(0, tl.where(dense, n, 0), BLOCK):
        tl.store(count_ptr + start + i, tl.zeros((BLOCK,), tl.int32), mask=start + i < n)


def launch_sparse_or_dense(
    lists: Lists,  # of the first chunk
    num_classes: int,
    kept: Kept,
    sparse: SparseGradient,
    sparse_total: Tensor,
    dense_total: Tensor,
) -> None:
    drop = sparse.gradient_mode == "drop"
    sparse_or_dense_kernel[(1,)](
        lists.lengths,
        kept.total,
        sparse_total,
        dense_total,
        lists.lengths.shape[0],
        num_classes if drop else triton.cdiv(num_classes, CLASSES_PER_ENTRY),
        BLOCK=DECIDING,
        num_warps=4,
    )
