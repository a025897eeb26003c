"""Liger-Kernel's fused linear cross-entropy, and its Hopper kernels, which must be requested.

liger                  Triton; gradients made in forward, one chunk of rows at a time, dW in the weight's dtype
liger_fp32             the same with accum_dtype=torch.float32
liger_cutedsl          CuTe DSL: holds all logits, overwrites them with the gradient; dX in each forward, dW in backward

Each is imported from its own file, because liger_kernel.transformers needs the transformers library. LIGER_KERNEL_IMPL,
which chooses among them, makes liger_kernel.ops take the Blackwell path of CuTe DSL on every GPU.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch
from torch import Tensor

from ..data import IGNORE_INDEX, Problem
from ..kl_div import teacher_of
from ..modes import Loss, Mode, Step, step_of
from .unavailable import Unavailable

VERSION_OF = "liger_kernel"
OPS = "liger_kernel.ops"
NEEDS = {  # module: the distribution that installs it
    "cutlass": "nvidia-cutlass-dsl",
    "cuda.bindings": "cuda-python",
}


def provide(name: str, problem: Problem, mode: Mode) -> Step:
    if mode.kind:
        if name != "liger":
            raise Unavailable("no divergence")
        return step_of(_divergence(problem, mode.kind), problem, mode)
    if name in ("liger", "liger_fp32"):
        return step_of(_triton(name, mode), problem, mode)
    if problem.input.device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        raise Unavailable("needs a Hopper GPU")
    if problem.input.dtype != torch.bfloat16:
        raise Unavailable("bf16 only")
    return step_of(_cutedsl(problem, mode), problem, mode)


def _triton(name: str, mode: Mode) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    accum_dtype = torch.float32 if name == "liger_fp32" else None
    if accum_dtype is not None and not mode.weight_grad:
        raise Unavailable("the same as liger without dW")

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        # Positional, as autograd.Function.apply needs. The arguments between reduction and accum_dtype are softcap=None
        # and return_z_loss=False.
        value, *_ = LigerFusedLinearCrossEntropyFunction.apply(
            input, linear_weight, target, None, None, IGNORE_INDEX, 0.0, 0.0, reduction, None, False, accum_dtype
        )
        return value

    return loss


def _divergence(problem: Problem, kind: str) -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    beta = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}[kind]
    divergence = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False)
    teacher = teacher_of(problem)
    every = torch.zeros_like(problem.target)

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return divergence(input, linear_weight, *teacher, every)

    return loss


def _cutedsl(problem: Problem, mode: Mode) -> Loss:
    if mode.per_token:
        raise Unavailable("mean and sum only")
    if problem.shape.N % 128 or problem.shape.V % 256:
        raise Unavailable("N must be a multiple of 128, V of 256")
    missing = [distribution for module, distribution in NEEDS.items() if find_spec(module.split(".")[0]) is None]
    if missing:
        raise Unavailable(f"needs {' and '.join(missing)}")
    function = importlib.import_module(f"{OPS}.cutedsl.ops.fused_linear_cross_entropy_sm90")
    fused = function.LigerFusedLinearCrossEntropySM90Function.apply

    def loss(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return fused(input, linear_weight, target, IGNORE_INDEX, reduction)

    return loss
