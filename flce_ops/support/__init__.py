"""What the operators need besides mathematics: memory limits, which path ran, devices, torch's private names, caches.

workspace.py              how much memory a call may use beside its results
path.py                   a table of paths; which path ran and why
symbolic.py               sizes and numbers that a compiled graph learns when it runs
integers.py               quotients and powers of 2 of sizes
target_range.py           a class index outside the vocabulary is an error
holes.py                  what is not implemented, with the error texts, and the function that errors name
versions.py               the oldest torch and Triton; the GPU's vendor and properties
torch_private.py          every private name of torch that is used
compile_cache.py          torch.compile's caches, keyed by this package's code
"""
