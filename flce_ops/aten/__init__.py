"""The inner operators in plain ATen, one chunk of rows at a time, for every device and dtype that Triton does not take.

rows.py                                numbers of rows, and gradients from their cotangents: of a head, of given logits
with_grad.py                           gradients made in forward: any row objective, also over a shared vocabulary
kl_div.py                              divergences
    valid_tokens.py                    which rows kernels get: without ignored tokens, or with zeros for them
    logits.py                          logits of a chunk, their softmax, sums over classes, the terms of the gradient
    chunks.py                          how rows are divided
    gradients.py                       the loop over chunks; the gradient GEMMs and their sums
"""

from .rows import backward, backward_in_place, forward
from .with_grad import with_grad

__all__ = ["backward", "backward_in_place", "forward", "with_grad"]
