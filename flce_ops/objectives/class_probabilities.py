"""Class probabilities q as a target: "cross_entropy" of divergence.py, of

    p_ij   = w_j [(1 - eps) q_ij + eps / V]                        w: weight; eps: label_smoothing
    loss_i = sum_j p_ij (lse_i - z_ij)

p may be negative, as class weights may, and the sums of p need not be 1.
"""

import torch
from torch import Tensor

# V vocabulary

OPTIONS = ("label_smoothing",)  # of cross-entropy's; the others are refused


def smoothed_and_weighted(
    target: Tensor,  # (..., V)
    weight: Tensor | None,  # (V,)
    label_smoothing: float,
    dtype: torch.dtype,  # of the sums
) -> Tensor:  # (..., V), p
    """target itself where it is p; else one more matrix of its size, in `dtype` at least."""
    target = target.detach()
    if label_smoothing == 0.0 and weight is None:
        return target
    weight = target.new_ones(target.shape[-1:], dtype=dtype) if weight is None else weight.detach().to(dtype)
    p = target * (weight * (1.0 - label_smoothing))
    return p if label_smoothing == 0.0 else p.add_(weight * (label_smoothing / target.shape[-1]))
