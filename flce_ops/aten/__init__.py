"""Kernels of the inner operators in plain ATen, a chunk of rows at a time: every device and dtype Triton does not take.

forward.py, backward.py, double_backward.py, kl_div.py    one operator each
with_grad.py                           those of one pass: any row objective, also where ranks share the vocabulary
    valid_tokens.py                    which rows they are given: ignored tokens left out, or as zeros
    logits.py                          logits of a chunk, their softmax, the gradient's terms
    chunks.py, gradients.py            how rows are cut; the gradient GEMMs and their sums over chunks
    sparse_gradients.py                the entries of a sparse gradient, as a dense matrix
    row_statistics.py                  exponentials of a chunk, and the by-products that are asked for
cross_entropy.py                       of given logits, without a GEMM
support.py                             rows of the classes of a support, without a GEMM
low_rank.py                            with_grad of a frozen head with a low-rank pair
    row_norms.py                       of W + s B A, which DoRA divides by
second_order.py, backward_tangent.py   what second derivatives share; their derivative along a vector
"""

from .backward import backward, backward_in_place
from .double_backward import double_backward
from .forward import forward
from .with_grad import with_grad

__all__ = ["backward", "backward_in_place", "double_backward", "forward", "with_grad"]
