"""Norms of the rows of W + s B A, without making that matrix. DoRA divides by them.

||W_j + s (B A)_j||^2 = ||W_j||^2 + 2 s B_j . (W A^T)_j + s^2 B_j (A A^T) B_j^T
"""

import torch
from torch import Tensor

from ..math.precision import accumulation_dtype
from .chunks import chunk_product

# D hidden, V vocabulary, r rank


@torch.no_grad()
def merged_row_norms(
    linear_weight: Tensor,  # (V, D), W
    down: Tensor,  # (r, D), A
    up: Tensor,  # (V, r), B
    scaling: float,
) -> Tensor:  # (V,) in the accumulation dtype
    dtype = accumulation_dtype(linear_weight.dtype)
    of_weight = torch.linalg.vector_norm(linear_weight, dim=1, dtype=dtype).square()
    cross = chunk_product(linear_weight, down.to(linear_weight.dtype)).to(dtype)  # (V, r), W A^T
    a, b = down.to(dtype), scaling * up.to(dtype)
    return (of_weight + (b * (2.0 * cross + b @ (a @ a.T))).sum(1)).sqrt()
