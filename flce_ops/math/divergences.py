"""The divergences of a chunk of rows and their gradients with respect to the student's logits.

With p the teacher's and q the student's probabilities over the columns of a row, and 0 log 0 = 0:

    forward   KL(p || q) = sum p (log p - log q)             G = q sum(p) - p
    reverse   KL(q || p) = sum q (log q - log p)             G = q (log q - log p - KL(q || p))
    jsd       m = beta p + (1 - beta) q
              beta KL(p || m) + (1 - beta) KL(q || m)        G = (1 - beta) q (log q - log m - KL(q || m))
    cross_entropy            -sum p log q                    G = q sum(p) - p

The derivative of "jsd" by q_j, both terms together, is (1 - beta) (log q_j - log m_j), as m's own derivatives cancel,
and the softmax takes a derivative d by q to q (d - sum q d). sum(p) is 1 unless probabilities were given that do not
add up to 1, such as a truncated top-k. "cross_entropy" is that of class probabilities times class weights, which may be
negative: it takes p where the others take log p, and leaves p as it is, which may be the user's tensor.

Where the vocabulary is sharded, a row here is this rank's part of it, and `total` adds the parts of all ranks. Every
function uses up its two matrices; log_p and log_q may hold -inf.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

# n rows of a chunk, v columns of this rank, k sums of a row

Kind = Literal["forward", "reverse", "jsd"]
KINDS = get_args(Kind)

# (n, v) matrices that exist at once, log_q and log_p among them.
MATRICES = {"forward": 3, "reverse": 3, "jsd": 4, "cross_entropy": 3}

Total = Callable[[Tensor], Tensor]  # (k, n) -> (k, n)
Result = tuple[Tensor | None, Tensor | None, Tensor | None]  # divergence (n,), student_kl (n,), G (n, v)


def divergence_and_gradient(
    kind: str,
    beta: Tensor | None,  # (), of "jsd"
    log_q: Tensor,  # (n, v)
    log_p: Tensor,  # (n, v); p of "cross_entropy"
    *,
    total: Total | None,  # None: the divergence is not wanted, student_kl is known
    student_kl: Tensor | None = None,  # (n,)
    row_scale: Tensor | None,  # (n,), factor of G; None: no gradient wanted
    normalized: bool,  # whether p is known to add up to 1
) -> Result:
    """`student_kl` is KL(q || p) for "reverse", KL(q || m) for "jsd", else None."""
    if kind == "cross_entropy":
        return cross_entropy(log_q, log_p, total, row_scale)
    if kind == "forward":
        return forward_kl(log_q, log_p, total, row_scale, normalized)
    if kind == "reverse":
        return reverse_kl(log_q, log_p, total, student_kl, row_scale)
    return jensen_shannon(beta, log_q, log_p, total, student_kl, row_scale)


def cross_entropy(log_q: Tensor, p: Tensor, total: Total | None, row_scale: Tensor | None) -> Result:
    divergence = None
    if total is not None:
        (divergence,) = total(torch.where(p == 0.0, 0.0, log_q).mul_(p).sum(1).neg_().unsqueeze(0))
    if row_scale is None:
        return divergence, None, None
    return divergence, None, log_q.exp_().mul_(p.sum(1, keepdim=True)).sub_(p).mul_(row_scale[:, None])


def forward_kl(log_q: Tensor, log_p: Tensor, total: Total | None, row_scale: Tensor | None, normalized: bool) -> Result:
    p = log_p.exp()
    divergence = None
    if total is not None:
        log_ratio = log_p.sub_(log_q).masked_fill_(p == 0.0, 0.0)
        (divergence,) = total(log_ratio.mul_(p).sum(1).unsqueeze(0))
    if row_scale is None:
        return divergence, None, None
    q = log_q.exp_()
    if not normalized:
        q.mul_(p.sum(1, keepdim=True))
    return divergence, None, q.sub_(p).mul_(row_scale[:, None])


def reverse_kl(
    log_q: Tensor, log_p: Tensor, total: Total | None, student_kl: Tensor | None, row_scale: Tensor | None
) -> Result:
    q = log_q.exp()
    log_ratio = log_q.sub_(log_p).masked_fill_(q == 0.0, 0.0)
    if total is not None:
        (student_kl,) = total(torch.mul(log_ratio, q, out=log_p).sum(1).unsqueeze(0))
    if row_scale is None:
        return student_kl, student_kl, None
    return student_kl, student_kl, log_ratio.sub_(student_kl[:, None]).mul_(q).mul_(row_scale[:, None])


def jensen_shannon(
    beta: Tensor,  # ()
    log_q: Tensor,
    log_p: Tensor,
    total: Total | None,
    student_kl: Tensor | None,
    row_scale: Tensor | None,
) -> Result:
    """With a = log p - log q: log q - log m = -log(1 - beta + beta e^a), log p - log m = -log(beta + (1 - beta) e^-a).

    So written both are exact to their own size, which beta bounds; log m itself would bring an error of log q's size.
    """
    own, others = torch.log1p(-beta), beta.log()
    a = log_p - log_q
    p, q = log_p.exp_(), log_q.exp_()
    teacher_part = None
    if total is not None:
        log_ratio = own - a  # becomes log p - log m
        torch.logaddexp(log_ratio, others, out=log_ratio).neg_()
        teacher_part = log_ratio.masked_fill_(p == 0.0, 0.0).mul_(p).sum(1)
        del log_ratio
    log_ratio = torch.logaddexp(a.add_(others), own, out=a).neg_().masked_fill_(q == 0.0, 0.0)  # log q - log m
    divergence = None
    if total is not None:
        student_part = torch.mul(log_ratio, q, out=p).sum(1)
        teacher_kl, student_kl = total(torch.stack([teacher_part, student_part]))
        divergence = beta * teacher_kl + (1.0 - beta) * student_kl
    if row_scale is None:
        return divergence, student_kl, None
    scale = (1.0 - beta) * row_scale
    return divergence, student_kl, q.mul_(log_ratio.sub_(student_kl[:, None])).mul_(scale[:, None])
