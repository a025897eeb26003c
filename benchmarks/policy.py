"""The mode "policy": DAPO's token loss with its KL term, in one call or as a formula on losses per token.

N tokens. A, old and ref are drawn around the log-probabilities of the problem; log p is minus the loss of a provider:

    r = exp(log p - old)      L = mean max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28)) + beta (e^-d + d - 1),  d = log p - ref
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .data import PolicyTokens, Problem

LOW, HIGH, BETA = 0.2, 0.28, 0.04
# standard deviations of log p - old, which is beyond the bounds for a fifth of the tokens, and of log p - ref
STEP, DRIFT = 0.2, 0.3


@torch.no_grad()
def tokens_of(problem: Problem) -> PolicyTokens:
    """The same tokens at every call."""
    if problem.policy is None:
        device, tokens = problem.input.device, problem.shape.N
        generator = torch.Generator(device=device).manual_seed(problem.seed + 1)
        noise = torch.randn(3, tokens, device=device, generator=generator)
        log_probs = torch.empty(tokens, device=device)
        for rows in problem.row_chunks():
            logits = (problem.input[rows] @ problem.linear_weight.T).float()
            target = problem.target[rows].clamp(min=0)[:, None]
            log_probs[rows] = (logits.gather(1, target) - logits.logsumexp(-1, keepdim=True))[:, 0]
        # advantages of both signs, whose losses do not cancel
        problem.policy = PolicyTokens(1 + noise[0], log_probs + STEP * noise[1], log_probs + DRIFT * noise[2])
    return problem.policy


def loss_of_log_probs(log_probs: Tensor, problem: Problem) -> Tensor:  # (N,) -> ()
    advantages, old, ref = tokens_of(problem)
    ratio, distance = torch.exp(log_probs - old), log_probs - ref
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - LOW, 1 + HIGH))
    losses = losses + BETA * (torch.exp(-distance) + distance - 1)
    return torch.where(problem.valid, losses, 0).sum() / problem.valid.sum()


def on_losses(loss: Callable[..., Tensor], problem: Problem) -> Callable[..., Tensor]:
    """Applies the formula to a provider's losses per token."""

    def of_formula(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return loss_of_log_probs(-loss(input, linear_weight, target, "none"), problem)

    return of_formula


def in_one_call(problem: Problem) -> Callable[..., Tensor]:
    import flce_ops

    tokens = tokens_of(problem)
    options = {"clip_low": LOW, "clip_high": HIGH, "beta": BETA}

    def of_operator(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return flce_ops.linear_policy_loss(input, linear_weight, target, *tokens, **options).loss

    return of_operator
