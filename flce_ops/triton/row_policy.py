"""flce_ops/math/policy.py in a kernel: the loss of a token under a policy and its derivative by the log-probability.

The kernels that call it hand `policy` and the two names through: an objective is read here and in math/policy.py only.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flce_ops.math.policy_arguments import PolicyOptions, PolicyTokens
from flce_ops.triton.logits_gemm import number_at

# N tokens


class Policy(NamedTuple):
    """One argument of a kernel: of tokens, (N,) float32, and of all of them, () each."""

    advantages: Any
    old_log_probs: Any
    ref_log_probs: Any
    clip_low: Any
    clip_high: Any
    dual_clip: Any
    beta: Any


def policy_of(tokens: PolicyTokens, options: PolicyOptions) -> tuple[Policy, dict[str, str]]:
    """And its names, constants of a kernel. The tokens' numbers are contiguous and float32."""
    _, *numbers, estimator = options
    names = {"OBJECTIVE": options.objective, "ESTIMATOR": estimator}
    return Policy(*tokens, *numbers), names


@triton.jit
def token_policy(
    log_prob,  # (n,) nats
    token,  # (n,) which tokens these are
    mask,  # (n,)
    scale,  # (n,) or ()
    policy,  # Policy, its tensors as pointers
    OBJECTIVE: tl.constexpr,
    ESTIMATOR: tl.constexpr,
):
    """(loss, slope times scale) of each token: 0 beyond a bound, also where the scale is inf."""
    advantage = tl.load(policy.advantages + token, mask=mask, other=0.0)
    ratio = tl.full(log_prob.shape, 1.0, tl.float32)
    if policy.old_log_probs is not None:
        ratio = tl.exp(log_prob - tl.load(policy.old_log_probs + token, mask=mask, other=0.0))
    lowest, highest = 1.0 - number_at(policy.clip_low), 1.0 + number_at(policy.clip_high)
    if OBJECTIVE == "cispo":
        weight = tl.where(ratio < lowest, lowest, tl.where(ratio > highest, highest, ratio))  # nan stays nan
        loss = -weight * advantage * log_prob
        slope = -weight * advantage * scale
    else:
        negative = advantage < 0.0
        lower = tl.where(negative, lowest, 0.0)
        upper = tl.where(negative, number_at(policy.dual_clip, float("inf")), highest)
        low, high = ratio < lower, ratio > upper
        loss = -advantage * tl.where(high, upper, tl.where(low, lower, ratio))
        slope = tl.where(low | high, 0.0, -advantage * ratio * scale)
    if policy.beta is not None:
        beta = number_at(policy.beta)
        distance = log_prob - tl.load(policy.ref_log_probs + token, mask=mask, other=0.0)
        if ESTIMATOR == "k1":
            loss += beta * distance
            slope += beta * scale
        elif ESTIMATOR == "k2":
            loss += beta * 0.5 * distance * distance
            slope += beta * distance * scale
        else:
            growth = tl.exp(-distance) - 1.0
            loss += beta * (growth + distance)
            slope -= beta * growth * scale
    return loss, slope
