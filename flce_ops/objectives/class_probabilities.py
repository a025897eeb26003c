"""Class probabilities q as a target: the forward divergence from p, less a constant.

    p_ij   = w_j [(1 - eps) q_ij + eps / V]                        w: weight; eps: label_smoothing
    loss_i = sum_j p_ij (lse_i - z_ij)
           = sum_j p_ij (log p_ij - log softmax(z)_ij)  -  sum_j p_ij log p_ij

The sums of p need not be 1.
"""

import torch
from torch import Tensor

from flce_ops.support.workspace import matrix_bytes

# N tokens, V vocabulary

OPTIONS = ("label_smoothing",)  # of cross-entropy's; the others are refused


def smoothed_and_weighted(
    target: Tensor,  # (..., V)
    weight: Tensor | None,  # (V,)
    label_smoothing: float,
) -> Tensor:  # (..., V), p
    """target itself where it is p; else one more matrix of its size, in its dtype unless the weights' is wider."""
    p = target.detach()
    if label_smoothing != 0.0:
        p = p.mul(1.0 - label_smoothing).add_(label_smoothing / p.shape[-1])
    return p if weight is None else p * weight.detach()


def sums_of_xlogx(p: Tensor, dtype: torch.dtype) -> Tensor:  # (N, V) -> (N,)
    """A block of rows at a time in eager mode, where x log x is a matrix; a compiled graph fuses it into the sum."""
    tokens, num_classes = p.shape
    if torch.compiler.is_compiling():
        return xlogx(p.to(dtype)).sum(1)
    rows = max(1, matrix_bytes(tokens) // (2 * dtype.itemsize * num_classes))  # a copy in dtype, x log x
    return torch.cat([xlogx(block.to(dtype)).sum(1) for block in p.split(rows)])


def xlogx(p: Tensor) -> Tensor:
    return torch.special.xlogy(p, p)
