"""The loss of one token under a policy, as a function of its log-probability.

Let A be the advantage, r = exp(log_prob - old) the ratio, clip(r) = min(max(r, 1 - clip_low), 1 + clip_high), c =
dual_clip and d = log_prob - ref. Without old log-probabilities, r is 1 but still has a derivative.

    "ppo"      max(-A r, -A clip(r)); if A < 0, at most -A c         "k1"   d
    "cispo"    -A clip(r) log_prob, where clip(r) is a constant      "k2"   d^2 / 2
               each + beta KL                                        "k3"   e^-d + d - 1

log_prob = z_y - lse, which is minus the surprisal. For "ppo" the ratio has an upper bound of 1 + clip_high if A >= 0;
if A < 0 it has a lower bound of 1 - clip_low and an upper bound of c. A ratio beyond a bound is replaced by the bound,
whose derivative is 0. This holds even if the ratio overflows, where autograd of the formula as written would compute 0
* inf.
"""

from math import inf, nextafter
from typing import Literal, NamedTuple, get_args

from torch import Tensor

from ..math.options import LARGEST, OptionalScalar, Ranges, Scalar, scalar, scalar_unless
from .row import RowFunction, RowObjective, clamp, constant, exp, expm1, number, of_tokens, where

# N tokens, D hidden, V vocabulary

Objective = Literal["ppo", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]
OBJECTIVES, KL_ESTIMATORS = get_args(Objective), get_args(KlEstimator)


class PolicyTokens(NamedTuple):
    """What is known of each token: constants in the accumulation dtype."""

    advantages: Tensor  # (N,)
    old_log_probs: Tensor | None = None  # (N,); None: those of the policy itself
    ref_log_probs: Tensor | None = None  # (N,), read only with beta


RANGES: Ranges = {
    "clip_low": ("expected clip_low, below the ratio 1, not to be negative", 0.0, inf),
    "clip_high": ("expected clip_high, above the ratio 1, not to be negative", 0.0, inf),
    "dual_clip": ("expected dual_clip to be greater than 1 or None", nextafter(1.0, inf), inf),
    "beta": ("expected beta to be finite", -LARGEST, LARGEST),
}


class PolicyNumbers(NamedTuple):
    """The user's numbers, in the order of the entry operator's schema."""

    objective: str = "ppo"
    clip_low: Scalar = 0.2
    clip_high: Scalar = 0.2
    dual_clip: OptionalScalar = None
    beta: Scalar = 0.0
    kl_estimator: str = "k3"


class PolicyOptions(NamedTuple):
    objective: str
    clip_low: Tensor  # (), as are the next three; the ratio's bounds are 1 - clip_low and 1 + clip_high
    clip_high: Tensor
    dual_clip: Tensor | None  # for "ppo"
    beta: Tensor | None  # the factor of the KL term
    kl_estimator: str


TOKEN_LEVEL = "its tokens' losses are those of objective='ppo', token_weight and normalizer add them up"
SEQUENCE_LEVEL = "a sequence's tokens share one ratio there; make it of flce_ops.linear_log_probs"
HINTS = dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo"), TOKEN_LEVEL)
HINTS |= dict.fromkeys(("gspo", "luspo", "vespo", "dpo"), SEQUENCE_LEVEL)


class Policy(RowObjective):
    bounded = True
    name = "linear_policy_loss"
    tokens_of, numbers, options_of, ranges = PolicyTokens, PolicyNumbers, PolicyOptions, RANGES

    @classmethod
    def check(cls, op: str, options: PolicyOptions, tokens: PolicyTokens) -> None:
        objective, estimator = options.objective, options.kl_estimator
        if objective not in OBJECTIVES:
            hint = HINTS.get(objective)
            raise ValueError(
                f"{op}: expected objective to be one of {', '.join(OBJECTIVES)}, got {objective!r}"
                + (f"; {hint}" if hint else "")
            )
        if estimator not in KL_ESTIMATORS:
            raise ValueError(f"{op}: expected kl_estimator to be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
        if options.dual_clip is not None and objective != "ppo":
            raise ValueError(f"{op}: dual_clip bounds the ratio of objective='ppo', got {objective!r}; leave it out")
        if options.beta is not None and tokens.ref_log_probs is None:
            raise ValueError(f"{op}: beta weighs the KL term, which needs ref_log_probs, of target's shape; got None")

    @classmethod
    def made_of(cls, numbers: PolicyNumbers, tokens: PolicyTokens, like: Tensor) -> PolicyOptions:
        """The options, without a KL term if there is no beta.

        dynamic=True makes beta a variable. Without ref_log_probs it is compared with 0 even then, so the graph is
        specialised on 0.
        """
        no_kl = tokens.ref_log_probs is None and numbers.beta == 0.0
        return PolicyOptions(
            numbers.objective,
            scalar(numbers.clip_low, like, "clip_low"),
            scalar(numbers.clip_high, like, "clip_high"),
            None if numbers.dual_clip is None else scalar(numbers.dual_clip, like, "dual_clip"),
            None if no_kl else scalar_unless(0.0, numbers.beta, like, "beta"),
            numbers.kl_estimator,
        )

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
                growth = expm1(-distance)  # e^-d - 1 would lose digits if the policies are nearly equal
                value = value + beta * (growth + distance)
                slope = slope - beta * growth
        return value, -slope
