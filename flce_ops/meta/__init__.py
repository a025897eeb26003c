"""Checks and allocated outputs of each inner operator.

One function per operator, registered as its fake kernel and called by every real kernel before any work, so that
shapes, dtypes and refusals cannot drift apart between eager, compiled and meta tensors. Imports only torch.
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
