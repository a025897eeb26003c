"""Liger-Kernel's fused linear cross-entropy: gradients made in forward, a chunk of rows at a time.

Default: dW accumulated in the weight's dtype. liger_fp32: accum_dtype=torch.float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "liger_kernel"


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    # From its own file rather than liger_kernel.transformers, which wants the transformers library.
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    accum_dtype = torch.float32 if name == "liger_fp32" else None
    if accum_dtype is not None and not mode.weight_grad:
        raise Unavailable("the same as liger without dW")

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        # Positional, as autograd.Function.apply takes it: the arguments between reduction and accum_dtype are
        # softcap=None and return_z_loss=False.
        value, *_ = LigerFusedLinearCrossEntropyFunction.apply(
            input, linear_weight, target, None, None, -100, 0.0, 0.0, reduction, None, False, accum_dtype
        )
        return value

    return step_of(loss, problem, mode)
