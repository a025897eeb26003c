"""torch.nn.functional.linear_cross_entropy with its chunked options (torch >= 2.13), at their defaults.

torch_chunked    ATen, chunk by chunk
torch_override   the same call where torch 2.15 has put a kernel of its own behind it: softmax and logit gradient in
                 CuTe DSL, if the packages for that are there when torch is imported
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..data import Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "torch"
OVERRIDDEN = "_linear_cross_entropy_batch_chunked"


def _is_overridden() -> bool:
    if torch.__version__ < (2, 15):
        return False
    from torch._native import registry

    return OVERRIDDEN in registry.get_dsl_operations("cutedsl", "torch_nn")


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    here = f"torch {torch.__version__.split('+')[0]}"
    if name == "torch_override" and torch.__version__ < (2, 15):
        raise Unavailable(f"{here} has no override of F.linear_cross_entropy (2.15 has)")
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"{here} has no chunked F.linear_cross_entropy (2.13 has)")
    if mode.per_token:
        raise Unavailable('reduction="none" falls back to the dense pair')
    if name == "torch_override" and not _is_overridden():
        raise Unavailable("needs apache-tvm-ffi and an nvidia-cutlass-dsl that this torch knows")
    if name == "torch_chunked" and _is_overridden():
        raise Unavailable("overridden: TORCH_DISABLE_NATIVE_JIT=1 gives it back")
    options = torch.nn.LinearCrossEntropyOptions()

    def loss(input, linear_weight, target, reduction):
        return F.linear_cross_entropy(input, linear_weight, target, reduction=reduction, options=options)

    return step_of(loss, problem, mode)
