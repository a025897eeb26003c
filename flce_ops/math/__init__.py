"""The mathematics around the objectives, in torch alone: arguments, numbers of rows, reductions.

options.py                     the arguments in groups, and the formulas that use them
statistics.py                  log-probability, entropy and other statistics of a row
reduction.py                   from the losses of tokens to a scalar
shards.py                      rows whose classes are spread over ranks
sparse_gradient.py             which entries of a logit gradient are kept, and what values they get
"""
