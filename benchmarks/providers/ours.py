"""flce_ops: eager, compiled, with other workspaces, and with the two-pass backward that recomputes the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "flce_ops"
WORKSPACE_MIB = {"ours_2GiB": 2048, "ours_128MiB": 128, "ours_64MiB": 64, "ours_6MiB": 6}


def _recompute_loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
    """The mean from per-token losses: gradients cannot be made in forward, so backward makes the logits again."""
    from flce_ops import linear_cross_entropy

    losses = linear_cross_entropy(input, linear_weight, target, reduction="none")
    return losses.sum() / (target != IGNORE_INDEX).sum()


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    import flce_ops

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return flce_ops.linear_cross_entropy(input, linear_weight, target, reduction=reduction)

    if name == "ours":
        return step_of(loss, problem, mode)
    if name == "ours_compiled":
        return step_of(torch.compile(loss, dynamic=False, fullgraph=True), problem, mode)
    if name == "ours_recompute":
        if mode.name in ("fwd", "none"):
            raise Unavailable("the same as ours in this mode")
        return step_of(_recompute_loss, problem, mode)

    if name == "ours_6MiB" and problem.input.is_cuda:
        raise Unavailable("for processors: a GPU's smallest chunk exceeds it")
    plain = step_of(loss, problem, mode)

    def step_in_workspace() -> Tensor:
        with flce_ops.workspace(WORKSPACE_MIB[name] * 2**20):
            return plain()

    return step_in_workspace
