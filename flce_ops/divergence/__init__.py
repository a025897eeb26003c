"""Distillation: divergences between a student's and a teacher's distribution over the vocabulary.

functional.py   the public function and the entry operator's body
ops.py          schemas, registration, FLOP formulas
autograd.py     what is saved, what comes back
rows.py         the divergences and their gradients, for a chunk of logits
reference.py    the kernels: chunks of rows in plain ATen
columns.py      what ranks that share the vocabulary tell each other
sharded.py      the entry on DTensors
operands.py, checks.py, meta.py   the arguments by name, their refusals, the results
"""

from flce_ops.divergence import ops as ops  # registers the operators
from flce_ops.divergence.functional import linear_kl_div

__all__ = ["linear_kl_div"]
