"""How many entries of a row of G = softmax - onehot an unbiased sparse gradient keeps, averaged over rows and draws.

sum_j min(|G_ij| / threshold, 1)
"""

# n tokens, D hidden, V vocabulary

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def entries_kept(
    input: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (n,)
    threshold: float,
) -> float:
    """Holds all (n, V) logits at once."""
    gradient = (input @ linear_weight.T).float().softmax(1)
    gradient[torch.arange(len(target), device=target.device), target] -= 1.0
    return float((gradient.abs_() / threshold).clamp_(max=1.0).sum(1).mean())
