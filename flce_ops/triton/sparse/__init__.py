"""Sparse gradients, which keep only some entries.

sparse_step.py           the chunks of a step whose logit gradient is sparse
sparse_lists.py          chooses the entries of each token that are kept, and draws their random numbers
sparse_or_dense.py       finds the blocks of classes that keep many entries, which GEMMs handle; sorts lists by class
gather_sums.py           sums of gathered rows, for both gradients; long lists in splits
"""
