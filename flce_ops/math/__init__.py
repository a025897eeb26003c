"""The mathematics around the objectives, in torch alone: arguments, numbers of rows, reductions.

options.py                     the arguments by group, and the formulas that they stand in
topk.py                        tokens whose target names several classes
log_probs.py, statistics.py    log-probability and entropy; accuracy and other by-products of a row
reduction.py                   from the losses of tokens to a scalar
shards.py                      rows whose classes are shared by ranks
support.py                     the classes that a token was sampled from
sparse_gradient.py             which entries of a logit gradient are kept, and what they become
kl_div_arguments.py            of linear_kl_div
precision.py                   the dtype of sums
"""
