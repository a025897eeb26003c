"""Checks and allocated outputs of each inner operator.

One function per operator, registered as its fake kernel and called by every real kernel before any work, so that
shapes, dtypes and refusals cannot drift apart between eager, compiled and meta tensors. Of this package it imports math
and support alone.

arguments.py, call.py            each operator's arguments as a class; a class as a schema and as a call
checks.py                        refusals of operands that operators share
main_grad.py, sparse_checks.py   of a buffer that a gradient is added to; of a sparse gradient
outputs.py                       results of the operators of a head
policy.py, low_rank.py           of the operators with a policy's losses, with a low-rank pair
kl_div.py, kl_div_checks.py      of those of linear_kl_div
cross_entropy.py                 of those of given logits
"""

from flce_ops.meta.outputs import (
    ForwardOutputs,
    Gradients,
    OnePassOutputs,
    backward_in_place_outputs,
    backward_outputs,
    double_backward_outputs,
    forward_outputs,
    retained_columns,
    vocab_parallel_with_grad_outputs,
    with_grad_outputs,
)

__all__ = [
    "ForwardOutputs",
    "Gradients",
    "backward_in_place_outputs",
    "OnePassOutputs",
    "backward_outputs",
    "double_backward_outputs",
    "forward_outputs",
    "retained_columns",
    "vocab_parallel_with_grad_outputs",
    "with_grad_outputs",
]
