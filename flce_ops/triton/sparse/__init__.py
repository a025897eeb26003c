"""Gradients of the entries that are kept, and rows of some classes.

sparse_run.py            which way: lists of entries, or live tiles
sparse_step.py           the chunks of a step whose logit gradient is sparse
sparse_lists.py          the entries that are kept, token by token, and their random numbers
sparse_or_dense.py       the classes of which these are many, and have GEMMs
class_order.py           the lists class by class
gather_sums.py           sums of gathered rows: both gradients; long lists in splits
live_tiles.py            the tiles that the gradients' GEMMs multiply
support.py               rows of the classes of a support, forward and backward
"""
