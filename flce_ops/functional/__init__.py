"""The public functions: each has a signature, a docstring that says what the arguments mean, and a call of its entry
operator.

linear_cross_entropy -> torch.ops.flce.linear_cross_entropy -> its body: flce_ops/entry/

loss.py         linear_cross_entropy
log_probs.py    linear_log_probs
kl_div.py       linear_kl_div
policy.py       linear_policy_loss
token_loss.py   linear_token_loss
logits.py       cross_entropy of given logits
public.py       makes a public function from its signature: checks types by name, and calls its operator
"""

from .kl_div import linear_kl_div as linear_kl_div
from .log_probs import LinearLogProbs as LinearLogProbs
from .log_probs import linear_log_probs as linear_log_probs
from .logits import cross_entropy as cross_entropy
from .loss import LinearCrossEntropyMetrics as LinearCrossEntropyMetrics
from .loss import linear_cross_entropy as linear_cross_entropy
from .policy import LinearPolicyResult as LinearPolicyResult
from .policy import linear_policy_loss as linear_policy_loss
from .token_loss import linear_token_loss as linear_token_loss
