"""The options of a sparse gradient for callers that count no steps: a seed of each call from torch's generator.

torch.manual_seed repeats it, a checkpoint that keeps the generator's state draws it again, and the host does not wait.
"""

from typing import Any

import torch

from ..math.sparse_gradient import SparseGradient
from ..meta.sparse_checks import check_sparse_options


def check_threshold(op: str, gradient_threshold: float) -> None:
    check_sparse_options(op, SparseGradient(gradient_threshold))


def sparse_options(gradient_threshold: float, device: torch.device) -> dict[str, Any]:
    """Empty for 0 and where no gradient will be asked for: an evaluation leaves the generator as it is."""
    if not gradient_threshold or not torch.is_grad_enabled():
        return {}
    seed = torch.randint(2**62, (), device=device)
    return {"gradient_threshold": gradient_threshold, "gradient_seed": seed}
