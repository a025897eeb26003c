"""The loss of one token under a policy, a function of its log-probability.

With A the advantage, r = exp(log_prob - old) (1, and differentiable, where the policy is its own old one),
clip(r) = min(max(r, 1 - clip_low), 1 + clip_high), c = dual_clip and d = log_prob - ref:

    "ppo"      max(-A r, -A clip(r)), where A < 0 at most -A c          "k1"   d
    "cispo"    -A clip(r) log_prob, clip(r) a constant                  "k2"   d^2 / 2
               each + beta KL                                           "k3"   e^-d + d - 1

log_prob = z_y - lse, minus the surprisal. For "ppo" a bound acts on one side only: 1 + clip_high where A >= 0, and
where A < 0 1 - clip_low and c. A ratio beyond its bound is the bound, whose derivative is 0, also where
the ratio overflows: there autograd of the formula as it is written makes 0 * inf.
"""

from collections.abc import Callable
from math import inf, nextafter
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from flce_ops.math.options import Ranges
from flce_ops.objectives.language import RowFunction, clamp, constant, exp, expm1, number, of_tokens, where
from flce_ops.objectives.row import RowObjective

# N tokens, D hidden, V vocabulary

Objective = Literal["ppo", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]
OBJECTIVES, KL_ESTIMATORS = get_args(Objective), get_args(KlEstimator)


class PolicyOperands(NamedTuple):
    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    target: Tensor  # (N,)
    linear_bias: Tensor | None = None  # (V,)


class PolicyTokens(NamedTuple):
    """What is known of each token, constants in the accumulation dtype."""

    advantages: Tensor  # (N,)
    old_log_probs: Tensor | None = None  # (N,); None for those of the policy itself
    ref_log_probs: Tensor | None = None  # (N,), read with beta

    def map(self, change: Callable[[Tensor], Tensor]) -> "PolicyTokens":
        return PolicyTokens(*(None if values is None else change(values) for values in self))


CONSTANTS = PolicyTokens._fields


RANGES: Ranges = {
    "clip_low": ("expected clip_low, below the ratio 1, not to be negative", 0.0, inf),
    "clip_high": ("expected clip_high, above the ratio 1, not to be negative", 0.0, inf),
    "dual_clip": ("expected dual_clip to be greater than 1 or None", nextafter(1.0, inf), inf),
}


class PolicyOptions(NamedTuple):
    objective: str
    clip_low: Tensor  # (), like the next three: the ratio's bounds are 1 - clip_low and 1 + clip_high
    clip_high: Tensor
    dual_clip: Tensor | None  # of "ppo"
    beta: Tensor | None  # factor of the KL term
    kl_estimator: str


class Policy(RowObjective):
    """Its tokens are PolicyTokens, its options PolicyOptions."""

    bounded = True

    @RowFunction
    def of_target(surprisal, weight, at, policy):
        log_prob = -surprisal
        advantage = of_tokens(policy.tokens.advantages, at)
        log_ratio = log_prob - constant(log_prob)
        if policy.tokens.old_log_probs is not None:
            log_ratio = log_prob - of_tokens(policy.tokens.old_log_probs, at)
        ratio = exp(constant(log_ratio))
        lowest, highest = 1.0 - number(policy.options.clip_low, 0.0), 1.0 + number(policy.options.clip_high, 0.0)
        if policy.options.objective == "cispo":
            slope = -(clamp(ratio, lowest, highest) * advantage)
            value = slope * log_prob
        else:
            negative = advantage < 0.0
            lower = where(negative, lowest, 0.0)
            upper = where(negative, number(policy.options.dual_clip, float("inf")), highest)
            beyond = (ratio < lower) | (ratio > upper)
            within = exp(where(beyond, 0.0, log_ratio))
            value = -advantage * where(beyond, clamp(ratio, lower, upper), within)
            slope = where(beyond, 0.0, -advantage * within)
        if policy.options.beta is not None:
            beta = number(policy.options.beta, 0.0)
            distance = log_prob - of_tokens(policy.tokens.ref_log_probs, at)
            if policy.options.kl_estimator == "k1":
                value = value + beta * distance
                slope = slope + beta
            elif policy.options.kl_estimator == "k2":
                value = value + beta * (0.5 * distance * distance)
                slope = slope + beta * distance
            else:
                growth = expm1(-distance)  # e^-d - 1 would keep few digits of nearly equal policies
                value = value + beta * (growth + distance)
                slope = slope - beta * growth
        return value, -slope
