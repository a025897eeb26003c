"""Objectives: what is computed from a row of logits. Cross-entropy and divergences have their mathematics once for ATen
and Triton.

row.py                      the protocol of a row objective: its two functions, losses and slopes of N tokens
cross_entropy.py            one class or K classes per token, class weights, label smoothing, z-loss
token_function.py           a user's function of one token: mapped over tokens, differentiated, checked
token_losses.py             the names of such functions; the decorator token_loss
token_objective.py          such a function as a row objective
policy.py                   the loss of a token under a policy, such functions: PPO, CISPO, KL estimators
given_slopes.py             cotangents that backward receives, as slopes
class_probabilities.py      targets that are distributions: a divergence minus a constant
divergence.py               divergences, defined by entry: forward and reverse KL, Jensen-Shannon, total variation
in_triton.py                the operations that functions of an objective may use, for kernels
"""
