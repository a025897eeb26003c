"""What is not mathematics: memory, which path ran, devices, torch's private names, caches.

workspace.py              how much memory a call may use beside its results
table.py, path.py         a table of paths; which one ran and why
running.py                the call of an operator that this thread runs
target_range.py           a class index outside the vocabulary is an error
holes.py                  what nobody wrote, and what is said of it
readable.py               layouts of matrices that BLAS reads without a copy
quantized.py              slices of quantized weights
exchange.py, dtensor.py   collectives inside an operator; whether DTensors are among the arguments
rank_check.py             FLCE_CHECK_RANKS=1: arguments that differ between the ranks of DTensors
vendor.py                 whose GPU it is; for which one kernels are compiled
torch_private.py          every private name of torch
compile_cache.py          torch.compile's caches, keyed by this package's code
"""
