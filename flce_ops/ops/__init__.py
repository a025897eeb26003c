"""The inner operators: schemas, kernels by dispatch key, autograd, autocast, FLOP formulas."""

from flce_ops.ops import flops as flops
from flce_ops.ops.registration import (
    linear_cross_entropy_backward,
    linear_cross_entropy_double_backward,
    linear_cross_entropy_forward,
    linear_cross_entropy_with_grad,
)

__all__ = [
    "linear_cross_entropy_backward",
    "linear_cross_entropy_double_backward",
    "linear_cross_entropy_forward",
    "linear_cross_entropy_with_grad",
]
