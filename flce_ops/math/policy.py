"""The loss of one token under a policy as a function of its log-probability, and the derivative by that.

With A the advantage, r = exp(log_prob - old) (1, and differentiable, where the policy is its own old one),
clip(r) = min(max(r, 1 - clip_low), 1 + clip_high), c = dual_clip and d = log_prob - ref:

    "ppo"      max(-A r, -A clip(r)), where A < 0 at most -A c          "k1"   d
    "cispo"    -A clip(r) log_prob, clip(r) a constant                  "k2"   d^2 / 2
               each + beta KL                                           "k3"   e^-d + d - 1

log_prob = z_y - lse, so with f' the derivative every gradient by z is  f' (onehot(y) - softmax(z)).

For "ppo" a bound acts on one side only: 1 + clip_high where A >= 0, and where A < 0 1 - clip_low and c. A ratio beyond
its bound is the bound, whose derivative is 0, also where the ratio overflows: there autograd of the formula as it is
written makes 0 * inf.
"""

import torch
from torch import Tensor

from flce_ops.math.policy_arguments import PolicyOptions, PolicyTokens

# N tokens


def policy_losses(log_probs: Tensor, tokens: PolicyTokens, options: PolicyOptions) -> Tensor:  # (N,)
    """Differentiable by log_probs."""
    log_ratio = log_ratio_of(log_probs, tokens)
    if options.objective == "cispo":
        losses = -(constant_weight(log_ratio, options) * tokens.advantages) * log_probs
    else:
        beyond, bound = clipped_ratio(log_ratio, tokens.advantages, options)
        losses = -tokens.advantages * torch.where(beyond, bound, ratio_within(log_ratio, beyond))
    if options.beta is None:
        return losses
    return losses + options.beta * kl_and_slope(log_probs - tokens.ref_log_probs, options.kl_estimator)[0]


def policy_slopes(
    log_probs: Tensor,  # (N,)
    tokens: PolicyTokens,
    options: PolicyOptions,
    scale: Tensor | float = 1.0,  # (N,)
) -> Tensor:  # (N,)
    """The derivative of each token's loss, times its scale, by its log-probability; differentiable once more.

    Beyond a bound it is 0 whatever the scale is, which a normalizer of 0 makes inf.
    """
    log_ratio = log_ratio_of(log_probs, tokens)
    if options.objective == "cispo":
        slopes = -(constant_weight(log_ratio, options) * tokens.advantages) * scale
    else:
        beyond, _ = clipped_ratio(log_ratio, tokens.advantages, options)
        slopes = torch.where(beyond, 0.0, -tokens.advantages * ratio_within(log_ratio, beyond) * scale)
    if options.beta is None:
        return slopes
    return slopes + options.beta * kl_and_slope(log_probs - tokens.ref_log_probs, options.kl_estimator)[1] * scale


def log_ratio_of(log_probs: Tensor, tokens: PolicyTokens) -> Tensor:  # (N,)
    return log_probs - (log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs)


def constant_weight(log_ratio: Tensor, options: PolicyOptions) -> Tensor:  # (N,)
    """clip(r) of "cispo"."""
    return log_ratio.detach().exp().clamp(1.0 - options.clip_low, 1.0 + options.clip_high)


def clipped_ratio(log_ratio: Tensor, advantages: Tensor, options: PolicyOptions) -> tuple[Tensor, Tensor]:  # (N,)
    """Whether the ratio is beyond a bound that acts on it, and the ratio within its bounds; constants."""
    ratio, negative = log_ratio.detach().exp(), advantages < 0.0
    most = torch.inf if options.dual_clip is None else options.dual_clip
    lower = torch.where(negative, 1.0 - options.clip_low, 0.0)
    upper = torch.where(negative, most, 1.0 + options.clip_high)
    return (ratio < lower) | (ratio > upper), ratio.clamp(lower, upper)


def ratio_within(log_ratio: Tensor, beyond: Tensor) -> Tensor:  # (N,)
    """exp(log_ratio) where the ratio is within its bounds; elsewhere any number whose derivative is finite."""
    return torch.where(beyond, 0.0, log_ratio).exp()


def kl_and_slope(distance: Tensor, estimator: str) -> tuple[Tensor, Tensor]:  # (N,) each
    """The estimate of a token's KL from d = log_prob - ref, and its derivative."""
    if estimator == "k1":
        return distance, torch.ones_like(distance)
    if estimator == "k2":
        return 0.5 * distance.square(), distance
    growth = torch.expm1(-distance)  # of nearly equal policies e^-d - 1 would keep few digits
    return growth + distance, -growth
