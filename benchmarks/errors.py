"""Errors of a step's loss and gradients: ||out - reference|| / ||reference||.

N tokens, D hidden, V vocabulary. The reference takes the same rounded inputs and computes in float64, one chunk of
tokens at a time:

    z = x W^T;  lse = logsumexp(z);  G = cotangent * (exp(z - lse) - onehot);  dX = G W;  dW = G^T x

With a softcap, z = cap tanh(x W^T / cap); smoothing and z_loss are as in docs/kernels.md. Gradients are those of the
loss times problem.loss_scale. With K classes a token with weights q, G = cotangent * (sum_k q_k exp(z - lse) - sum_k
q_k onehot_k). "log_probs" has the opposite sign, and adds the gradient of the entropy H: -cotangent_H p (log p + H).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .data import Problem
from .kl_div import exact as exact_divergence
from .modes import Mode
from .policy import loss_of_log_probs
from .soft import targets_of


class Reference(NamedTuple):
    loss: Tensor  # () or (N,)
    grad_input: Tensor | None  # (N, D)
    grad_weight: Tensor | None  # (V, D)


class Errors(NamedTuple):
    loss: float | None
    dx: float | None
    dw: float | None

    @property
    def finite(self) -> bool:
        return all(error is None or error < float("inf") for error in self)  # also False for nan


def make_policy_reference(problem: Problem, mode: Mode) -> Reference:
    """Computes the losses per token first. The formula's slopes by them are the cotangents of the reference."""
    per_token = mode._replace(name="none")
    losses, *_ = make_reference(problem, per_token._replace(input_grad=False, weight_grad=False))
    losses.requires_grad_()
    loss = loss_of_log_probs(-losses, problem)
    (slopes,) = torch.autograd.grad(loss * problem.loss_scale, losses)
    _, *gradients = make_reference(replace(problem, cotangent=slopes), per_token)
    return Reference(loss.detach(), *gradients)


@torch.no_grad()
def make_reference(problem: Problem, mode: Mode) -> Reference:
    with torch.enable_grad():
        if mode.name == "policy":
            return make_policy_reference(problem, mode)
        if mode.kind:
            loss, *gradients = exact_divergence(problem, mode.kind)
            return Reference(loss, *(gradient * problem.loss_scale for gradient in gradients))
    # Data-centre GPUs multiply float64 as fast as float32 without TF32. Other GPUs take a minute for a large shape.
    dtype = torch.float64
    weight = problem.linear_weight.to(dtype)
    losses = torch.zeros(problem.shape.N, dtype=dtype, device=weight.device)
    grad_input = torch.empty_like(problem.input, dtype=dtype) if mode.input_grad else None
    grad_weight = torch.zeros_like(weight) if mode.weight_grad else None
    valid = problem.valid
    scale = problem.cotangent.to(dtype) if mode.per_token else torch.full_like(losses, problem.loss_scale) / valid.sum()
    cap, smoothing, z_loss = (mode.options.get(name) or 0.0 for name in ("softcap", "label_smoothing", "z_loss"))
    of_entropy = problem.entropy_cotangent.to(dtype) if mode.reduction == "log_probs" else None
    sign = 1 if of_entropy is None else -1

    for rows in problem.row_chunks():
        x = problem.input[rows].to(dtype)
        target = problem.target[rows][:, None]
        q = torch.ones_like(target, dtype=dtype)
        if mode.name == "soft64":
            target, q = (of_all[rows] for of_all in targets_of(problem))
        target, q = target.clamp(min=0), q.to(dtype)
        z = x @ weight.T
        slope = None
        if cap:
            slope = 1 - z.div_(cap).tanh_().square()
            z.mul_(cap)
        lse = z.logsumexp(-1, keepdim=True)
        loss = (1 - smoothing) * (q * (lse - z.gather(1, target))).sum(1)
        if smoothing or z_loss:
            loss += smoothing * (lse[:, 0] - z.mean(1)) + z_loss * lse[:, 0].square()
        losses[rows] = torch.where(valid[rows], sign * loss, 0)
        if not mode.backward:
            continue
        log_p = z.sub_(lse)
        p = log_p.exp()
        entropy_grad = None
        if of_entropy is not None:
            entropy = -(p * log_p).sum(1, keepdim=True)
            entropy_grad = log_p.add_(entropy).mul_(p).mul_(torch.where(valid[rows], -of_entropy[rows], 0)[:, None])
        by_lse = (1 - smoothing) * q.sum(1, keepdim=True) + smoothing + 2 * z_loss * lse
        grad_z = p.mul_(by_lse).scatter_add_(1, target, (smoothing - 1) * q)
        if smoothing:
            grad_z.sub_(smoothing / problem.shape.V)
        grad_z.mul_(torch.where(valid[rows], sign * scale[rows], 0)[:, None])
        if entropy_grad is not None:
            grad_z.add_(entropy_grad)
        if slope is not None:
            grad_z.mul_(slope)
        if grad_input is not None:
            torch.mm(grad_z, weight, out=grad_input[rows])
        if grad_weight is not None:
            grad_weight.addmm_(grad_z.T, x)
    loss = losses if mode.per_token else losses.sum() / valid.sum()
    return Reference(loss, grad_input, grad_weight)


def distance(out: Tensor | None, reference: Tensor | None) -> float | None:
    if reference is None:
        return None
    if out is None:
        return float("inf")  # the gradient is missing
    if out.shape != reference.shape:
        raise ValueError(f"expected shape {tuple(reference.shape)}, got {tuple(out.shape)}")
    # by slices of rows: a float32 copy of a whole (V, D) gradient takes gigabytes
    out, reference = torch.atleast_2d(out), torch.atleast_2d(reference)
    squares = torch.zeros(2, dtype=torch.float64, device=reference.device)
    for ours, truth in zip(out.split(16384), reference.split(16384), strict=True):
        squares[0] += (ours.to(truth.dtype) - truth).double().square().sum()
        squares[1] += truth.double().square().sum()
    return float((squares[0] / squares[1]).sqrt())


@torch.no_grad()
def errors_of(loss: Tensor, problem: Problem, reference: Reference) -> Errors:
    """The errors of the step that has just run, whose gradients are in .grad."""
    return Errors(
        distance(loss, reference.loss),
        distance(problem.input.grad, reference.grad_input),
        distance(problem.linear_weight.grad, reference.grad_weight),
    )


def poison(device: torch.device, at_most: int = 24 << 30) -> None:
    """Leaves NaN in the memory that the next step's torch.empty will get, so that an output which nothing wrote shows.

    For CUDA only, whose caching allocator reuses the blocks that were just freed."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    nan = {"fill_value": float("nan"), "dtype": torch.bfloat16, "device": device}  # two bfloat16 NaNs are a float32 NaN
    large = torch.full((min(free // 2, at_most) // 2,), **nan)
    small = [torch.full((1 << 18,), **nan) for _ in range(64)]  # 512 KiB each, for the allocator's pool of small blocks
    del large, small
