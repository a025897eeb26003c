"""The loss of one token under a policy, as functions of its log-probability that token_function.py differentiates.

Let A be the advantage, r = exp(log_prob - old) the ratio, clip(r) = min(max(r, 1 - clip_low), 1 + clip_high), c =
dual_clip and d = log_prob - ref. Without old log-probabilities, r is 1 but still has a derivative.

    "ppo"      max(-A r, -A clip(r)); if A < 0, at most -A c         "k1"   d
    "cispo"    -A clip(r) log_prob, where clip(r) is a constant      "k2"   d^2 / 2
               each + beta KL                                        "k3"   e^-d + d - 1

For "ppo" the ratio has an upper bound of 1 + clip_high if A >= 0; if A < 0 it has a lower bound of 1 - clip_low and an
upper bound of c. A ratio beyond a bound is replaced by the bound, whose derivative is 0. This holds even if the ratio
overflows, where autograd of the formula as written would compute 0 * inf.
"""

import functools
import itertools
from math import inf, nextafter
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..math.options import LARGEST, OptionalScalar, Ranges, Scalar, scalar, scalar_unless
from .token_function import TokenLoss, registered

# n tokens of a chunk

Objective = Literal["ppo", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]
OBJECTIVES, KL_ESTIMATORS = get_args(Objective), get_args(KlEstimator)
OP = "linear_policy_loss"

RANGES: Ranges = {
    "clip_low": ("expected clip_low, below the ratio 1, not to be negative", 0.0, inf),
    "clip_high": ("expected clip_high, above the ratio 1, not to be negative", 0.0, inf),
    "dual_clip": ("expected dual_clip to be greater than 1 or None", nextafter(1.0, inf), inf),
    "beta": ("expected beta to be finite", -LARGEST, LARGEST),
}


class PolicyTokens(NamedTuple):
    """What is known of each token: constants."""

    advantages: Tensor  # (...)
    old_log_probs: Tensor | None = None  # (...); None: those of the policy itself
    ref_log_probs: Tensor | None = None  # (...), read only with beta


class PolicyNumbers(NamedTuple):
    """The user's numbers, in the order of the entry operator's schema."""

    objective: str = "ppo"
    clip_low: Scalar = 0.2
    clip_high: Scalar = 0.2
    dual_clip: OptionalScalar = None
    beta: Scalar = 0.0
    kl_estimator: str = "k3"


TOKEN_LEVEL = "its tokens' losses are those of objective='ppo', token_weight and normalizer add them up"
SEQUENCE_LEVEL = "a sequence's tokens share one ratio there; make it of flce_ops.linear_log_probs"
HINTS = dict.fromkeys(("grpo", "dr_grpo", "bnpo", "dapo"), TOKEN_LEVEL)
HINTS |= dict.fromkeys(("gspo", "luspo", "vespo", "dpo"), SEQUENCE_LEVEL)


def check_policy(op: str, numbers: PolicyNumbers, kl: bool, tokens: PolicyTokens) -> None:
    objective, estimator = numbers.objective, numbers.kl_estimator
    if objective not in OBJECTIVES:
        hint = HINTS.get(objective)
        raise ValueError(
            f"{op}: expected objective to be one of {', '.join(OBJECTIVES)}, got {objective!r}"
            + (f"; {hint}" if hint else "")
        )
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"{op}: expected kl_estimator to be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")
    if numbers.dual_clip is not None and objective != "ppo":
        raise ValueError(f"{op}: dual_clip bounds the ratio of objective='ppo', got {objective!r}; leave it out")
    if kl and tokens.ref_log_probs is None:
        raise ValueError(f"{op}: beta weighs the KL term, which needs ref_log_probs, of target's shape; got None")


def policy_of(op: str, numbers: PolicyNumbers, tokens: PolicyTokens, like: Tensor) -> tuple[TokenLoss, list[Tensor]]:
    """The function of a token, and its tensors. There is no KL term if there is no beta.

    dynamic=True makes beta a variable. Without ref_log_probs it is compared with 0 even then, so the graph is
    specialised on 0.
    """
    beta = None
    if tokens.ref_log_probs is not None or numbers.beta != 0.0:
        beta = scalar_unless(0.0, numbers.beta, like, "beta")
    check_policy(op, numbers, beta is not None, tokens)
    bounds = [scalar(numbers.clip_low, like, "clip_low"), scalar(numbers.clip_high, like, "clip_high")]
    if numbers.objective == "ppo":
        bounds.append(scalar(inf if numbers.dual_clip is None else numbers.dual_clip, like, "dual_clip"))
    given = [tokens.advantages, tokens.old_log_probs, *bounds, tokens.ref_log_probs if beta is not None else None, beta]
    name = name_of(numbers.objective, tokens.old_log_probs is not None, None if beta is None else numbers.kl_estimator)
    return registered[name], [tensor for tensor in given if tensor is not None]


def name_of(objective: str, has_old: bool, estimator: str | None) -> str:
    return ".".join(("flce_ops", objective, *(["old"] if has_old else []), *([estimator] if estimator else [])))


def loss_of_policy(
    log_prob: Tensor,  # (n,)
    advantage: Tensor,  # (n,)
    *others: Tensor,  # (n,) each: the rest of what policy_of returns
    objective: str,
    has_old: bool,
    estimator: str | None,
) -> Tensor:  # (n,)
    old, rest = (others[0], others[1:]) if has_old else (log_prob.detach(), others)
    if objective == "ppo":
        (clip_low, clip_high, dual_clip), kl = rest[:3], rest[3:]
        loss = clipped_surrogate(log_prob - old, advantage, 1.0 - clip_low, 1.0 + clip_high, dual_clip)
    else:
        (clip_low, clip_high), kl = rest[:2], rest[2:]
        ratio = (log_prob - old).detach().exp().clamp(1.0 - clip_low, 1.0 + clip_high)
        loss = -(ratio * advantage) * log_prob
    if estimator is not None:
        reference, beta = kl
        loss = loss + beta * kl_of_token(log_prob - reference, estimator)
    return loss


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, lowest: Tensor, highest: Tensor, dual_clip: Tensor
) -> Tensor:  # (n,) each
    ratio, negative = log_ratio.detach().exp(), advantage < 0.0
    lower = torch.where(negative, lowest, 0.0)
    upper = torch.where(negative, dual_clip, highest)
    beyond = (ratio < lower) | (ratio > upper)
    within = torch.where(beyond, 0.0, log_ratio).exp()
    return -advantage * torch.where(beyond, ratio.clamp(lower, upper), within)


def kl_of_token(distance: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return 0.5 * distance * distance
    return torch.expm1(-distance) + distance  # e^-d - 1 would lose digits if the policies are nearly equal


for _objective, _has_old, _estimator in itertools.product(OBJECTIVES, (False, True), (None, *KL_ESTIMATORS)):
    _loss = functools.partial(loss_of_policy, objective=_objective, has_old=_has_old, estimator=_estimator)
    _name = name_of(_objective, _has_old, _estimator)
    registered[_name] = TokenLoss(_loss, _name, op=OP, by_vector=True)
