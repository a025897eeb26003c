"""torch's own F.linear_cross_entropy with options (torch >= 2.13). torch_function in torch_dense.py is that without.

torch_chunked             options=LinearCrossEntropyOptions(), its defaults
torch_chunked_accurate    acc_policy="accurate"

Under an older torch, its two files are used, which bring_peers.sh copies from a newer torch as the package
torch_linear_cross_entropy.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..modes import Loss, Mode, Step, step_of
from .unavailable import Unavailable

COPY = "torch_linear_cross_entropy"
VERSION_OF = "torch" if hasattr(torch.nn, "LinearCrossEntropyOptions") else COPY
OPTIONS: dict[str, dict[str, Any]] = {"torch_chunked": {}, "torch_chunked_accurate": {"acc_policy": "accurate"}}


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    if mode.options or mode.kind or mode.reduction == "log_probs" or mode.name == "soft64":
        raise Unavailable("not in this mode")
    if VERSION_OF == "torch":
        return step_of(_function(torch.nn.LinearCrossEntropyOptions(**OPTIONS[name])), problem, mode)
    return step_of(copied_function(**OPTIONS[name]), problem, mode)


def _function(options: Any) -> Loss:
    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return F.linear_cross_entropy(input, linear_weight, target, reduction=reduction, options=options)

    return loss


def _copied(file: str) -> ModuleType:
    try:
        return importlib.import_module(f"{COPY}.{file}")
    except ModuleNotFoundError:
        reason = f"torch {torch.__version__.split('+')[0]} has no chunked F.linear_cross_entropy, and {COPY} is missing"
        raise Unavailable(reason) from None


def copied_function(**chosen: Any) -> Loss:
    """What F.linear_cross_entropy does with these options, by the two files."""
    operators = _copied("linear_cross_entropy")
    options = _copied("linear_cross_entropy_options").LinearCrossEntropyOptions(**chosen)

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        tokens, hidden = input.shape
        sizes = {"num_batches": tokens, "in_features": hidden, "num_classes": linear_weight.shape[0]}
        known = options._adjust(**sizes, dtype=input.dtype, device=input.device)
        how = (known.batch_chunk_size, known.acc_policy, known.acc_dtype)
        operands = (input, linear_weight, target, None, None)
        if reduction == "none":
            return operators._linear_cross_entropy_batch_chunked_no_reduction(*operands, IGNORE_INDEX, *how)
        wanted = [leaf.requires_grad and torch.is_grad_enabled() for leaf in (input, linear_weight)]
        of_loss = (reduction, IGNORE_INDEX, 0.0, *how, known.allow_retain_graph)
        return operators._linear_cross_entropy_batch_chunked(*operands, *of_loss, *wanted, False)[0]

    return loss
