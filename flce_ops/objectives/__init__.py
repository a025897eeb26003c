"""Objectives: what is computed from a row of logits. Cross-entropy and divergences have their mathematics once for ATen
and Triton.

cross_entropy.py            a row objective's functions, losses and slopes of N tokens; cross-entropy of one class or K
                            classes per token, class weights, label smoothing, z-loss
token_function.py           a user's function of one token: its name, its derivative by autograd, as a row objective
policy.py                   the loss of a token under a policy, such functions: PPO, CISPO, KL estimators
divergence.py               divergences, defined by entry: forward and reverse KL, Jensen-Shannon; class probabilities
in_triton.py                the operations that functions of an objective may use, for kernels
"""
