"""The cross-entropy of given logits.

cross_entropy.py             the operators and their launches: one program per row
cross_entropy_kernels.py     the kernel of a row
logit_rows.py                reading a row in groups of 16 bytes
logit_gradient.py            writing the row's gradient
"""
