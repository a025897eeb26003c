"""The tensors and numbers that linear_policy_loss and its operator take, by name."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from torch import Tensor

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

    def of(self, rows: slice) -> "PolicyTokens":
        return self.map(lambda values: values[rows])


CONSTANTS = PolicyTokens._fields


class PolicyOptions(NamedTuple):
    objective: str
    clip_low: Tensor  # (), like the next three: the ratio's bounds are 1 - clip_low and 1 + clip_high
    clip_high: Tensor
    dual_clip: Tensor | None  # of "ppo"
    beta: Tensor | None  # factor of the KL term
    kl_estimator: str
