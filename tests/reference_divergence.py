"""The references for linear_kl_div: divergences of dense (N, V) logits, and inputs for them."""

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

import math

import torch
import torch.nn.functional as F
from inputs import make_inputs
from reference_loss import dense_logits
from torch import Tensor

RAGGED = (123, 57, 43, 211)  # N, D, E, V
KINDS = ("forward", "reverse", "jsd", "tv", "nla")
KINKED = ("tv", "nla")  # if rounding puts an entry on the other side of p = q, its gradient changes by 2 |G|


def make_pair(
    shape: tuple[int, int, int, int] = RAGGED,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    bias: bool = False,
    token_weight: bool = False,
    target: bool = True,
    probs: bool = False,
    close: bool = False,
    ignored: float = 0.15,
    requires_grad: bool = True,
) -> dict[str, Tensor]:
    """The arguments of linear_kl_div by name. The teacher is another model (a KL of a few nats), or close to the
    student.
    """
    N, D, E, V = shape
    student = make_inputs(
        (N, D, V),
        device=device,
        dtype=dtype,
        bias=bias,
        token_weight=token_weight,
        ignored=ignored,
        requires_grad=requires_grad,
    )
    teacher = make_inputs((N, E, V), device=device, dtype=dtype, bias=bias, requires_grad=False)
    teacher_input, teacher_weight, teacher_bias = teacher.input, teacher.linear_weight, teacher.linear_bias
    if close:
        teacher_input = student.input.detach().clone()
        teacher_weight = (student.linear_weight + 0.05 * torch.randn(V, D, device=device)).detach().to(dtype)
        teacher_bias = None if student.linear_bias is None else student.linear_bias.detach().clone()
    pair = {"input": student.input, "linear_weight": student.linear_weight}
    if probs:
        logits = F.linear(teacher_input, teacher_weight, teacher_bias).double()
        # for exact zeros in float16, F.kl_div returns nan with log_target=True
        pair["teacher_probs"] = logits.softmax(-1).clamp_min(2.0**-14).to(dtype)
    else:
        pair |= {"teacher_input": teacher_input, "teacher_weight": teacher_weight}
    if bias:
        pair["linear_bias"] = student.linear_bias
        if not probs:
            pair["teacher_bias"] = teacher_bias
    if target:
        pair["target"] = student.target
    if token_weight:
        pair["token_weight"] = student.token_weight
    return pair


def clone(pair: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same values as new leaves, in another floating dtype if one is given."""
    return {
        name: tensor.detach()
        .to(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, copy=True)
        .requires_grad_(tensor.requires_grad)
        for name, tensor in pair.items()
    }


def leaves(pair: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in pair.items() if tensor.requires_grad}


def dense_log_probs(pair, logit_scale, softcap, teacher_logit_scale, teacher_softcap):
    """Logits in the operands' dtype, as a model computes them, and the log-probabilities of their float32 (float64)
    copy.
    """

    def log_softmax(input, weight, bias, scale, cap):
        logits = dense_logits(input, weight, bias, softcap=cap, logit_scale=scale)
        return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)

    log_q = log_softmax(pair["input"], pair["linear_weight"], pair.get("linear_bias"), logit_scale, softcap)
    if "teacher_probs" in pair:
        return log_q, pair["teacher_probs"].to(log_q.dtype).log()
    scale = logit_scale if teacher_logit_scale is None else teacher_logit_scale
    teacher = pair["teacher_input"], pair["teacher_weight"], pair.get("teacher_bias")
    return log_q, log_softmax(*teacher, scale, teacher_softcap)


def acceptance(kind: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    """The total variation, or -log of the acceptance rate of speculative sampling."""
    q, p = log_q.exp(), log_p.exp()
    return 0.5 * (p - q).abs().sum(-1) if kind == "tv" else -torch.minimum(p, q).sum(-1).log()


def from_definition(kind: str, beta: float, log_q: Tensor, log_p: Tensor) -> Tensor:
    """The sums of the docstring; terms of probability 0 are left out."""

    def kl(log_a, log_b):
        present = log_a > -math.inf
        return torch.where(present, log_a.exp() * torch.where(present, log_a - log_b, 0.0), 0.0).sum(-1)

    if kind in KINKED:
        return acceptance(kind, log_q, log_p)
    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def with_kl_div(kind: str, beta: float, log_q: Tensor, log_p: Tensor) -> Tensor:
    """The form that trainers write, with F.kl_div(input, target) = KL(target || input), the mixture in log space."""

    def kl(log_a, log_b):
        return F.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if kind in KINKED:
        return acceptance(kind, log_q, log_p)
    if kind == "forward":
        return kl(log_p, log_q)
    if kind == "reverse":
        return kl(log_q, log_p)
    log_m = torch.logsumexp(torch.stack([log_q + math.log(1 - beta), log_p + math.log(beta)]), dim=0)
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def dense_divergence(
    divergence,
    *,
    kind: str = "forward",
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Tensor | float | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    **pair: Tensor,
) -> Tensor:
    log_probs = dense_log_probs(pair, logit_scale, softcap, teacher_logit_scale, teacher_softcap)
    rows = divergence(kind, beta, *log_probs)
    target, token_weight = pair.get("target"), pair.get("token_weight")
    valid = torch.ones_like(rows, dtype=torch.bool) if target is None else target != ignore_index
    if token_weight is not None:
        rows = rows * token_weight
    rows = torch.where(valid, rows, 0.0)
    if reduction == "none":
        return rows
    if normalizer is not None:
        return rows.sum() / normalizer
    return rows.sum() / valid.sum().clamp(min=1) if reduction == "mean" else rows.sum()


def reference_divergence(**arguments) -> Tensor:
    return dense_divergence(from_definition, **arguments)


def plain_divergence(**arguments) -> Tensor:
    return dense_divergence(with_kl_div, **arguments)


def run(function, pair: dict[str, Tensor], cotangent: Tensor | None = None, **options) -> dict[str, Tensor]:
    """Loss and gradients of one call on fresh leaves, by argument name."""
    pair = clone(pair)
    loss = function(**pair, **options)
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent.to(loss.dtype))
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves(pair).items()}}


def run_reference(pair: dict[str, Tensor], cotangent: Tensor | None = None, **options) -> dict[str, Tensor]:
    """In float64, on the same numbers that the operator gets."""
    return run(reference_divergence, clone(pair, torch.float64), cotangent, **options)
