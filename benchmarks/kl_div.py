"""The modes "kl_...": a distillation step from a teacher's hidden states, forward and backward, averaged over tokens.

N tokens, D hidden, V vocabulary. With p the teacher's and q the student's probabilities, m = (p + q) / 2:

    forward  sum p (log p - log q)     reverse  sum q (log q - log p)     jsd  (KL(p || m) + KL(q || m)) / 2
    tv       sum |p - q| / 2           nla      -log sum min(p, q)

The floor is four products: the logits of both heads, and both gradients of the student's. Every token counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .data import Problem, Teacher, make_problem

ROWS = 512  # rows of float64 logits held at a time


def teacher_of(problem: Problem) -> Teacher:
    """The same teacher at every call."""
    if problem.teacher is None:
        device, dtype = problem.input.device, problem.input.dtype
        other = make_problem(problem.shape, dtype=dtype, device=device, seed=problem.seed + 1)
        problem.teacher = Teacher(other.input, other.linear_weight)
    return problem.teacher


def divergence(log_q: Tensor, log_p: Tensor, kind: str) -> Tensor:
    """Summed over classes; log_q is the student's."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward":
        return (p * (log_p - log_q)).sum()
    if kind == "reverse":
        return (q * (log_q - log_p)).sum()
    if kind == "tv":
        return 0.5 * (p - q).abs().sum()
    if kind == "nla":
        return -torch.minimum(p, q).sum(-1).log().sum()
    log_m = (0.5 * p + 0.5 * q).log()
    return 0.5 * (p * (log_p - log_m)).sum() + 0.5 * (q * (log_q - log_m)).sum()


def dense(x: Tensor, w: Tensor, tx: Tensor, tw: Tensor, kind: str) -> Tensor:
    accumulate = torch.promote_types(x.dtype, torch.float32)
    log_q, log_p = ((a @ b.T).to(accumulate).log_softmax(-1) for a, b in ((x, w), (tx, tw)))
    return divergence(log_q, log_p, kind) / x.shape[0]


def in_one_call(problem: Problem, kind: str) -> Callable[..., Tensor]:
    import flce_ops

    teacher = teacher_of(problem)

    def of_operator(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return flce_ops.linear_kl_div(input, linear_weight, *teacher, kind=kind, reduction=reduction)

    return of_operator


def of_dense(problem: Problem, kind: str) -> Callable[..., Tensor]:
    teacher = teacher_of(problem)

    def of_formula(input: Tensor, linear_weight: Tensor, target: Tensor, reduction: str) -> Tensor:
        return dense(input, linear_weight, *teacher, kind)

    return of_formula


@torch.no_grad()
def logit_gradient(problem: Problem) -> Tensor:  # (N, V)
    """The gradient of "forward". Real numbers are needed, because a card's speed depends on their bits."""
    x, w, (tx, tw) = problem.input, problem.linear_weight, teacher_of(problem)
    grad = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    for out, rows, of_teacher in zip(grad.split(ROWS), x.split(ROWS), tx.split(ROWS)):
        p, q = ((a @ b.T).float().softmax(-1) for a, b in ((of_teacher, tw), (rows, w)))
        out.copy_((q - p) / x.shape[0])
    return grad


def exact(problem: Problem, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the student's gradients in float64."""
    w, (tx, tw) = problem.linear_weight.detach().double().requires_grad_(), teacher_of(problem)
    tw = tw.double()
    loss, grads = torch.zeros((), dtype=torch.float64, device=w.device), []
    for rows, of_teacher in zip(problem.input.split(ROWS), tx.split(ROWS)):
        x = rows.detach().double().requires_grad_()
        part = dense(x, w, of_teacher.double(), tw, kind) * (len(rows) / problem.shape.N)
        part.backward()
        loss += part.detach()
        grads.append(x.grad)
    return loss, torch.cat(grads), w.grad
