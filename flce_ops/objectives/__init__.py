"""Objectives: what is computed from a row of logits. One file each, with its mathematics once for ATen and Triton.

row.py                      the protocol of a row objective: its two functions, losses and slopes of N tokens
cross_entropy.py            one class or K classes per token, class weights, label smoothing, z-loss
policy.py                   the loss of a token under a policy: PPO, CISPO, KL estimators
given_slopes.py             cotangents that backward receives, as slopes
class_probabilities.py      targets that are distributions: a divergence minus a constant
divergence.py               divergences, defined by entry: forward and reverse KL, Jensen-Shannon, total variation
in_triton.py                the operations that these functions may use, for kernels
"""

import importlib
import pkgutil

# importing a file registers its objective, so a new objective needs nothing but a file in this folder
for _module in pkgutil.iter_modules(__path__):
    if _module.name != "in_triton":  # it imports Triton, which only code that runs kernels does
        importlib.import_module(f"{__name__}.{_module.name}")
