"""The public functions: what the arguments mean, and the call of the entry operator.

linear_cross_entropy -> torch.ops.flce.linear_cross_entropy -> its body: flce_ops/entry/
"""

from flce_ops.functional.kl_div import linear_kl_div
from flce_ops.functional.log_probs import LinearLogProbs, linear_log_probs
from flce_ops.functional.logits import cross_entropy
from flce_ops.functional.loss import LinearCrossEntropyMetrics, linear_cross_entropy
from flce_ops.functional.policy import LinearPolicyResult, linear_policy_loss

__all__ = [
    "LinearCrossEntropyMetrics",
    "LinearLogProbs",
    "LinearPolicyResult",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "linear_policy_loss",
]
