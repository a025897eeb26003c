"""The floor: the bare GEMMs of a mode through torch.mm (cuBLAS), at full N, nothing between them.

                 logits            dX                dW
    fwd_bwd    x @ W.T           G @ W            G.T @ x
    fwd        x @ W.T
    lora       x @ W.T           G @ W
    none       x @ W.T (twice)   G @ W            G.T @ x

N tokens, D hidden, V vocabulary. G (N, V) is the problem's real gradient of the logits, made once: what the bits are
decides how much power the card draws and so how fast it runs (zeros: 13 % faster than random numbers).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..modes import Mode, Step

VERSION_OF = "torch"


@torch.no_grad()
def _logit_gradient(problem: Problem) -> Tensor:
    """softmax(x W^T) - onehot over the number of tokens kept, rounded to the inputs' dtype: (N, V)."""
    x, weight, target = problem.input, problem.linear_weight, problem.target
    grad = torch.empty(problem.shape.N, problem.shape.V, dtype=x.dtype, device=x.device)
    kept = target != IGNORE_INDEX
    scale = kept / kept.sum()
    for rows in problem.row_chunks():
        p = (x[rows] @ weight.T).float().softmax(-1)
        p.scatter_add_(1, target[rows].clamp(min=0)[:, None], torch.full_like(p[:, :1], -1))
        grad[rows] = p.mul_(scale[rows, None]).to(x.dtype)
    return grad


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    x, weight = problem.input.detach(), problem.linear_weight.detach()
    grad = _logit_gradient(problem) if mode.backward else None

    def step() -> None:
        torch.mm(x, weight.T)
        if mode.reduction == "none":
            torch.mm(x, weight.T)
        # The products are kept to the end: gradients outlive the step that made them.
        grad_input = torch.mm(grad, weight) if mode.input_grad else None
        grad_weight = torch.mm(grad.T, x) if mode.weight_grad else None
        del grad_input, grad_weight

    return step
