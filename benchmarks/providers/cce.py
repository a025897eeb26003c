"""Apple's cut cross-entropy: logits are computed tile by tile and discarded, in forward and again in backward.

cce                default: blocks of the gradient below bf16's resolution are skipped
cce_exact          nothing is skipped
cce_kahan_full_c   dC unfiltered and accumulated in higher precision; a preset newer than 25.1.1
"""

from __future__ import annotations

import inspect

from torch import Tensor

from ..data import Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "cut_cross_entropy"


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    if problem.input.device.type != "cuda":
        raise Unavailable("needs a GPU")
    if problem.input.element_size() != 2:
        raise Unavailable("bf16 and fp16 only")
    if not mode.backward and name != "cce":
        raise Unavailable("the same as cce without gradients")
    from cut_cross_entropy import linear_cross_entropy

    has_presets = "accum_c_fp32" in inspect.signature(linear_cross_entropy).parameters
    if has_presets:
        options = {"impl": name}
    elif name == "cce_kahan_full_c":
        raise Unavailable("this version has no such preset")
    else:
        options = {} if name == "cce" else {"filter_eps": None}

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return linear_cross_entropy(input, linear_weight, target, reduction=reduction, **options)

    return step_of(loss, problem, mode)
