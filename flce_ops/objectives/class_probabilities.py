"""Class probabilities q as a target: the kind "cross_entropy" of divergence.py, with

    p_ij   = w_j [(1 - eps) q_ij + eps / V]                        w: weight; eps: label_smoothing
    loss_i = sum_j p_ij (lse_i - z_ij)

p may be negative, because class weights may, and p need not add up to 1.
"""

import torch
from torch import Tensor

# V vocabulary

OPTIONS = ("label_smoothing",)  # the only option of cross-entropy that is allowed; others are refused


def smoothed_and_weighted(
    target: Tensor,  # (..., V)
    weight: Tensor | None,  # (V,)
    label_smoothing: float,
    dtype: torch.dtype,  # dtype of the sums
) -> Tensor:  # (..., V), p
    """Returns p: `target` itself if no option changes it; otherwise a new matrix, in `dtype` or wider."""
    target = target.detach()
    if label_smoothing == 0.0 and weight is None:
        return target
    weight = target.new_ones(target.shape[-1:], dtype=dtype) if weight is None else weight.detach().to(dtype)
    p = target * (weight * (1.0 - label_smoothing))
    return p if label_smoothing == 0.0 else p.add_(weight * (label_smoothing / target.shape[-1]))
