"""The mathematics around the objectives, in torch alone: arguments, numbers of rows, reductions.

options.py                        the arguments in groups, and the formulas that use them
statistics.py                     log-probability, entropy and other statistics of a row, also of shards of classes
token_weights_and_denominator.py  from the losses of tokens to a scalar: weights of 0, the mean's denominator
sparse_gradient.py                which entries of a logit gradient are kept, and what values they get
"""
