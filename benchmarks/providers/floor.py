"""The floor: only the GEMMs of a mode, by torch.mm (cuBLAS), over the valid tokens.

                 logits            dX                dW
    fwd_bwd    x @ W.T           G @ W            G.T @ x
    fwd        x @ W.T
    lora       x @ W.T           G @ W
    none       x @ W.T           G @ W            G.T @ x       log_probs and the others likewise
    kl_...     x @ W.T           G @ W            G.T @ x       and the teacher's logits, of all tokens

n valid tokens, D hidden, V vocabulary. G (n, V) is the problem's real logit gradient, computed once: the bits decide
how much power the card draws and so how fast it runs (zeros are 13 % faster than random numbers).

The valid tokens are filled up with ignored ones to a multiple of 8, for which cuBLAS has its fast kernels for dW.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import Problem
from ..kl_div import logit_gradient, teacher_of
from ..modes import Mode, Step

VERSION_OF = "torch"


MULTIPLE = 8


def _rows(problem: Problem) -> Tensor:
    """(n,) indices of the valid tokens, and of a few ignored ones."""
    valid = problem.valid
    count = -(-int(valid.sum()) // MULTIPLE) * MULTIPLE
    return (~valid).to(torch.int8).argsort(stable=True)[:count].sort().values


@torch.no_grad()
def _logit_gradient(problem: Problem, tokens: Tensor) -> Tensor:
    """softmax(x W^T) - onehot over the number of valid tokens, rounded to the inputs' dtype: (n, V)."""
    x, weight, valid = problem.input, problem.linear_weight, problem.valid
    grad = torch.empty(tokens.shape[0], problem.shape.V, dtype=x.dtype, device=x.device)
    scale = valid / valid.sum()
    for rows in problem.row_chunks():
        here = tokens[rows]
        p = (x[here] @ weight.T).float().softmax(-1)
        p.scatter_add_(1, problem.target[here].clamp(min=0)[:, None], torch.full_like(p[:, :1], -1))
        grad[rows] = p.mul_(scale[here, None]).to(x.dtype)
    return grad


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    x, weight = problem.input.detach(), problem.linear_weight.detach()
    teacher = teacher_of(problem) if mode.kind else None
    if teacher is None:
        tokens = _rows(problem)
        x = x[tokens]
        grad = _logit_gradient(problem, tokens) if mode.backward else None
    else:
        grad = logit_gradient(problem)

    def step() -> None:
        if teacher is not None:
            torch.mm(teacher.input, teacher.linear_weight.T)
        torch.mm(x, weight.T)
        # Holds the products to the end, because a real step's gradients outlive the step.
        grad_input = torch.mm(grad, weight) if mode.input_grad else None
        grad_weight = torch.mm(grad.T, x) if mode.weight_grad else None
        del grad_input, grad_weight

    return step
