"""What one writes by hand: F.cross_entropy(F.linear(x, w).float(), target), eager and through torch.compile.

The upcast is what model code does (and autocast makes): the softmax runs in float32, the logits were rounded before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Problem
from ..modes import Mode, Step, step_of
from ..soft import on_logits

VERSION_OF = "torch"


def dense_loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(F.linear(input, linear_weight).float(), target, reduction=reduction)


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    loss = on_logits(problem) if mode.name == "soft64" else dense_loss
    if name == "torch_eager":
        return step_of(loss, problem, mode)
    # dynamic=False: kernels for these very sizes, not for symbolic ones after the second shape of a run.
    return step_of(torch.compile(loss, dynamic=False, fullgraph=True), problem, mode)
