"""Options of a sparse gradient for callers that do not count steps: each call draws its seed from torch's generator.

torch.manual_seed makes the seeds repeat. A checkpoint that restores the generator's state draws the same seed. The host
does not wait.
"""

from typing import Any

import torch

from ..math.sparse_gradient import SparseGradient
from ..meta.checks import check_sparse


def check_threshold(op: str, gradient_threshold: float) -> None:
    check_sparse(op, SparseGradient(gradient_threshold))


def sparse_options(gradient_threshold: float, device: torch.device) -> dict[str, Any]:
    """Empty for 0, and if no gradient will be requested: an evaluation leaves the generator's state unchanged."""
    if not gradient_threshold or not torch.is_grad_enabled():
        return {}
    seed = torch.randint(2**62, (), device=device)
    return {"gradient_threshold": gradient_threshold, "gradient_seed": seed}
