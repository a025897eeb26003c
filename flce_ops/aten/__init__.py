"""The inner operators in plain ATen, one chunk of rows at a time, for every device and dtype that Triton does not take.

forward.py, backward.py, kl_div.py     one operator each
with_grad.py                           gradients made in forward: any row objective, also over a shared vocabulary
    valid_tokens.py                    which rows kernels get: without ignored tokens, or with zeros for them
    logits.py                          logits of a chunk, their softmax, the terms of the gradient
    chunks.py, gradients.py            how rows are divided; the gradient GEMMs and their sums over chunks
    row_statistics.py                  exponentials of a chunk, sums over its classes, statistics on request; in a fixed
                                       order
cross_entropy.py                       given logits, without a GEMM
"""

from .backward import backward, backward_in_place
from .forward import forward
from .with_grad import with_grad

__all__ = ["backward", "backward_in_place", "forward", "with_grad"]
