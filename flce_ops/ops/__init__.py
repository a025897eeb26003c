"""The inner operators: schemas, kernels by dispatch key, autograd, autocast, FLOP formulas."""

from flce_ops.ops import flops as flops  # registers the operators, and their formulas
