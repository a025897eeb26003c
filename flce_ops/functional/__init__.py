"""The public functions: each has a signature, a docstring that says what the arguments mean, and a call of its entry
operator.

linear_cross_entropy -> torch.ops.flce.linear_cross_entropy -> its body: flce_ops/entry/

cross_entropy_loss.py    linear_cross_entropy; cross_entropy of given logits
log_probs.py             linear_log_probs; linear_token_loss and linear_policy_loss, functions of a log-probability
kl_div.py                linear_kl_div
public.py                makes a public function from its signature: checks types by name, and calls its operator
"""

from .cross_entropy_loss import LinearCrossEntropyMetrics, cross_entropy, linear_cross_entropy
from .kl_div import linear_kl_div
from .log_probs import LinearLogProbs, LinearPolicyResult, linear_log_probs, linear_policy_loss, linear_token_loss

__all__ = [
    "LinearCrossEntropyMetrics",
    "LinearLogProbs",
    "LinearPolicyResult",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_log_probs",
    "linear_policy_loss",
    "linear_token_loss",
]
