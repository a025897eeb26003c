"""The cross-entropy of given logits.

cross_entropy.py             the operators: one program a row
cross_entropy_kernels.py     their kernels
logit_rows.py                a row in groups of 16 bytes
logit_gradient.py            its gradient, written once
"""
