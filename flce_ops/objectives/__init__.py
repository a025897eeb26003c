"""What is made of a row of logits: an objective a file, its mathematics once for ATen and for Triton.

row.py                      the protocol of a row objective: its two functions, losses and slopes of N tokens
cross_entropy.py            one class or K classes a token, class weights, label smoothing, z-loss
policy.py                   the loss of a token under a policy: PPO, CISPO, KL estimators
given_slopes.py             slopes that backward brings
class_probabilities.py      targets that are distributions: a divergence less a constant
divergence.py               of an entry: forward and reverse KL, Jensen-Shannon
language.py, in_triton.py   the words that the functions may use, on tensors and in a kernel
"""

import importlib
import pkgutil

# each registers itself: a new objective is a file here
for _module in pkgutil.iter_modules(__path__):
    if _module.name != "in_triton":  # who runs kernels has imported Triton
        importlib.import_module(f"{__name__}.{_module.name}")
