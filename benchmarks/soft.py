"""The mode "soft64": the teacher's 64 most probable classes for each token, with their probabilities (top-k
distillation).

N tokens, K classes of each. The teacher's logits are the problem's logits with noise. Its K probabilities add up to
less than 1 (0.8 to 0.9 in these problems). The loss is the mean, over the valid tokens, of

    loss_i = -sum_k q_ik log p_i(y_ik)

with q the teacher's probabilities and p the student's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import IGNORE_INDEX, Problem, SoftTargets

CLASSES = 64
NOISE = 0.5  # standard deviation between the teacher's logits and the problem's


@torch.no_grad()
def targets_of(problem: Problem) -> SoftTargets:
    """The same targets at every call."""
    if problem.soft is None:
        device = problem.input.device
        generator = torch.Generator(device=device).manual_seed(problem.seed + 1)
        topk = min(CLASSES, problem.shape.V)
        weight = torch.empty(problem.shape.N, topk, device=device)
        classes = torch.empty(problem.shape.N, topk, dtype=torch.int64, device=device)
        for rows in problem.row_chunks():
            logits = (problem.input[rows] @ problem.linear_weight.T).float()
            noise = torch.randn(logits.shape, device=device, generator=generator)
            weight[rows], classes[rows] = logits.add_(noise, alpha=NOISE).softmax(-1).topk(topk, -1)
        classes[~problem.valid] = IGNORE_INDEX
        problem.soft = SoftTargets(classes, weight)
    return problem.soft


def in_one_call(problem: Problem) -> Callable[..., Tensor]:
    import flce_ops

    classes, weight = targets_of(problem)

    def of_operator(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return flce_ops.linear_cross_entropy(input, linear_weight, classes, target_weight=weight, reduction=reduction)

    return of_operator


def on_logits(problem: Problem) -> Callable[..., Tensor]:
    classes, weight = targets_of(problem)

    def dense(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        logits = F.linear(input, linear_weight).float()
        valid = target != IGNORE_INDEX
        at_classes = logits.gather(1, classes.clamp(min=0))
        losses = (weight * (logits.logsumexp(-1, keepdim=True) - at_classes)).sum(-1)
        return torch.where(valid, losses, 0).sum() / valid.sum()

    return dense
