"""Targets with several classes per token: (N, K) class indices, some of which may be ignore_index. A target (N,) has
one class per token.

A token is valid if any of its classes is not ignore_index.
"""

import torch
from torch import Tensor

# N tokens, K classes of each


def tokens_that_count(target: Tensor, ignore_index: int) -> Tensor:  # (N,) or (N, K) -> (N,) bool
    counts = target != ignore_index
    return counts if target.dim() == 1 else counts.any(1)


def beside_topk(per_token: Tensor, per_target: Tensor) -> Tensor:  # (...), and (...) or (..., K) -> (...) or (..., 1)
    return per_token if per_token.dim() == per_target.dim() else per_token.unsqueeze(-1)


def in_columns(per_target: Tensor) -> Tensor:  # (N,) or (N, K) -> (N, K)
    return per_target.unsqueeze(1) if per_target.dim() == 1 else per_target


def repeats(target: Tensor) -> Tensor:  # (..., K) -> (..., K) bool
    """Whether the same class stands earlier in the same row."""
    ordered, order = target.sort(stable=True, dim=-1)
    same = torch.zeros_like(target, dtype=torch.bool)
    same[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return torch.zeros_like(same).scatter(-1, order, same)
