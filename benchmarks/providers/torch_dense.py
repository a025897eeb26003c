"""What one writes by hand: F.cross_entropy(F.linear(x, w).float(), target), eager and with torch.compile.

The upcast is what model code does (and autocast adds): the softmax runs in float32, on logits that were rounded before.
torch_function has no upcast: it is F.linear_cross_entropy(options=None) of torch >= 2.13, with all logits.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..kl_div import of_dense as divergence_of_dense
from ..modes import Mode, Step, step_of
from ..soft import on_logits
from .unavailable import Unavailable

VERSION_OF = "torch"


def dense_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    reduction: str,
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    upcast: bool = True,
) -> Tensor:
    logits = F.linear(input, linear_weight)
    if upcast:
        logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, target, reduction=reduction, label_smoothing=label_smoothing)


def dense_log_probs(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
    log_p = F.linear(input, linear_weight).float().log_softmax(-1)
    log_probs = log_p.gather(1, target.clamp(min=0)[:, None])[:, 0]
    valid = target != IGNORE_INDEX
    return torch.where(valid, log_probs, 0), torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0)


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    loss = dense_log_probs if mode.reduction == "log_probs" else partial(dense_loss, **mode.options)
    if mode.kind:
        loss = divergence_of_dense(problem, mode.kind)
    if mode.name == "soft64":
        loss = on_logits(problem)
    if name == "torch_function":
        if mode.kind or mode.reduction == "log_probs" or mode.name == "soft64":
            raise Unavailable("not in this mode")
        loss = partial(dense_loss, upcast=False, **mode.options)
    if name != "torch_compile":
        return step_of(loss, problem, mode)
    # dynamic=False compiles for these sizes. Otherwise the second shape of a run would get kernels for symbolic sizes.
    return step_of(torch.compile(loss, dynamic=False, fullgraph=True), problem, mode)
