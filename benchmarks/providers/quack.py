"""QuACK's linear cross-entropy for Hopper and Blackwell, in the CUTLASS DSL.

quack_chunked      logits of 4096 rows, a row kernel, two GEMMs; the dW GEMM with its default tiles
quack_autotuned    the same, after autotuning the dW GEMM (about three minutes at the first call)
quack_scaled_exp   stores exp(z - rowmax of the tile) instead of logits; no autotuning involved
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..data import Problem
from ..modes import Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "quack_kernels"
ROWS = 4096  # QuACK's default chunk


@functools.cache
def _import_quack():
    """QuACK makes a fingerprint of everything an epilogue function refers to, and refuses objects that it cannot name.
    Unless the CUTLASS DSL is in a folder called site-packages, it also inspects that library and meets a logger and the
    like. This gives such objects their type's name as key. That is coarse, but safe here, where one process has one
    version of everything.
    """
    from quack.gemm_runtime import identity

    strict_key = identity.semantic_value_key

    def key_or_type_name(value, seen):
        try:
            return strict_key(value, seen)
        except TypeError:
            return ("unnamed", type(value).__module__, type(value).__qualname__)

    identity.semantic_value_key = key_or_type_name  # must precede the next import, which makes the epilogues
    from quack import linear_cross_entropy

    return linear_cross_entropy


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    n, _, v = problem.shape
    if problem.input.device.type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        raise Unavailable("needs a Hopper or Blackwell GPU")
    if mode.per_token:
        raise Unavailable('no reduction="none" without the logits')
    if n % 8 or v % 8:
        raise Unavailable("N and V must be multiples of 8")
    if name == "quack_autotuned" and not mode.weight_grad:
        raise Unavailable("the same as quack_chunked without dW")
    quack = _import_quack()
    scaled_exp = name == "quack_scaled_exp"
    if scaled_exp and not quack.scaled_exp_lce_supported(problem.input, problem.linear_weight, ROWS, mode.reduction):
        raise Unavailable("its scaled-exp path does not take this shape, dtype or GPU")

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return quack.chunked_linear_cross_entropy(
            input,
            linear_weight,
            target,
            chunk_size=ROWS,
            reduction=reduction,
            tuned=name == "quack_autotuned",
            use_scaled_exp=scaled_exp,
        )

    return step_of(loss, problem, mode)
