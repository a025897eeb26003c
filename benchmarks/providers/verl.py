"""verl's log-probabilities and entropies: Triton kernels that store no logits; backward recomputes them.

Imported from its own files: the package needs Ray and tensordict, but its kernels do not. They process every token;
ignored tokens get target 0 and cotangents of 0.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "verl"


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    if not mode.per_token:
        raise Unavailable("losses per token only")
    import_packages_without_their_init("verl", "verl.utils")
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor | tuple[Tensor, Tensor]:
        valid = target != IGNORE_INDEX
        log_probs, entropy = linear_cross_entropy(input, linear_weight, target.clamp(min=0), 1.0, "none")
        if reduction == "log_probs":
            return torch.where(valid, log_probs, 0), torch.where(valid, entropy, 0)
        return torch.where(valid, -log_probs, 0)

    return step_of(loss, problem, mode)


def import_packages_without_their_init(*names: str) -> None:
    for name in names:
        if name in sys.modules:
            continue
        spec = find_spec(name)  # imports the parent package, which is loaded by now
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        package = ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
