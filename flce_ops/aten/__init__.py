"""The inner operators in plain ATen, one chunk of rows at a time, for every device and dtype that Triton does not take.

cross_entropy.py    of a head and of given logits: numbers of rows; gradients from their cotangents; gradients made in
                    forward, of any row objective, also over a shared vocabulary
kl_div.py           divergences
chunks.py           which rows a kernel gets, without ignored tokens or with zeros for them, and how they are divided
logits.py           logits of a chunk, their softmax, sums over classes, the terms of the gradient
gradients.py        the loop over chunks; the gradient GEMMs and their sums
"""

from .cross_entropy import backward, backward_in_place, forward, with_grad

__all__ = ["backward", "backward_in_place", "forward", "with_grad"]
