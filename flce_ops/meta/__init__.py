"""What inner operators take, check and return.

Each has its arguments and results as a class. From it follow the schema, the fake kernel and what every real kernel
does before any work, so that shapes, dtypes and refusals cannot drift apart between eager, compiled and meta tensors.
Of this package it imports math and support alone.

arguments.py, call.py            each operator's arguments and results as a class; a class as a schema and as a call
all_classes.py                   tokens without a support, by the operators of a head
results.py                       kinds of results, how each is allocated
outputs.py                       the checks of a call, and its results
checks.py                        refusals of operands that operators share
main_grad.py, sparse_checks.py   of a buffer that a gradient is added to; of a sparse gradient
kl_div_checks.py                 of a divergence's operands
"""

from ..math.options import saved_columns
from .outputs import Gradients, Outputs, outputs

__all__ = ["Gradients", "Outputs", "outputs", "saved_columns"]
