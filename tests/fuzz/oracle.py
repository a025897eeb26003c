"""The functions on dense (N, V) logits in plain torch: as a user writes them, and in float64 the truth.

The yardstick has the better of two habits: logits leave F.linear in the operands' dtype and are upcast at once, so that
scale, cap and loss are computed in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.cases import Case
from tests.fuzz.problem import Tensors, accumulated

# N tokens, D hidden, V vocabulary


def call(case: Case, at: Tensors) -> Tensors:
    """The outputs by name."""
    learnt = {case.learnt: at["learnt"]} if case.learnt else {}
    scale, temperature = case.logit_scale, case.temperature
    if case.learnt in ("logit_scale", "temperature"):  # documented: multiplied into input and bias, in their dtype
        factor = at["learnt"] if case.learnt == "logit_scale" else scale / at["learnt"]
        at = {name: tensor * factor if name in ("input", "bias") else tensor for name, tensor in at.items()}
        scale, temperature = 1.0, temperature if case.learnt == "logit_scale" else 1.0
    valid = at["target"] != case.ignore_index
    # what ignored rows hold does not matter, nan and infinite divergences included
    at = {**at, "input": torch.where(valid.unsqueeze(-1), at["input"], 0.0)}
    cap = learnt.get("softcap", case.softcap)
    z = logits(at["input"], at["weight"], at.get("bias"), scale, cap) / temperature
    classes = torch.where(valid, at["target"], 0).long()
    if case.function == "log_probs":
        log_p = F.log_softmax(z, -1)
        found = {
            "log_probs": torch.where(valid, log_p.gather(-1, classes.unsqueeze(-1)).squeeze(-1), 0.0),
            "lse": torch.where(valid, torch.logsumexp(z, -1), 0.0),
        }
        if case.entropy:
            # p log p = 0 where a bias of -inf switches a class off
            found["entropy"] = torch.where(valid, -(log_p.exp() * log_p.masked_fill(z == -torch.inf, 0.0)).sum(-1), 0.0)
        if case.argmax:
            found["logits"] = z.detach()
        return found
    if case.function == "kl_div":
        count = valid.to(z.dtype).sum().clamp(min=1.0)  # the mean over no token is 0
        return {"loss": reduced(case, divergences(case, at, z, valid.unsqueeze(-1)), at, count)}
    found = {"loss": cross_entropy(case, at, z, valid, classes, learnt.get("z_loss", case.z_loss))}
    if case.function == "metrics":
        found["logits"] = z.detach()
    return found


def logits(
    input: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | float, cap: Tensor | float | None
) -> Tensor:
    z = scale * accumulated(F.linear(input, weight, bias))
    if cap is None:
        return z
    return cap * (exact_tanh(z / cap) if z.dtype == torch.float64 else torch.tanh(z / cap))


def exact_tanh(y: Tensor) -> Tensor:
    """tanh whose slope, made by autograd, keeps its digits where it is small; torch's 1 - tanh^2 is a difference."""
    size = torch.where(y >= 0.0, y, -y)
    exponential = torch.exp(-2.0 * size)
    far = torch.where(y >= 0.0, 1.0, -1.0) * (1.0 - exponential) / (1.0 + exponential)
    return torch.where(size < 0.5, torch.tanh(y), far)


def cross_entropy(case: Case, at: Tensors, z: Tensor, valid: Tensor, classes: Tensor, z_loss: Tensor | float) -> Tensor:
    options = {"ignore_index": case.ignore_index, "label_smoothing": case.label_smoothing}
    class_weight = at["class_weight"].to(z.dtype) if "class_weight" in at else None
    flat, target = z.reshape(-1, z.shape[-1]), at["target"].long().reshape(-1)
    if not (case.z_loss or case.token_weight or case.normalizer):
        loss = F.cross_entropy(flat, target, class_weight, reduction=case.reduction, **options)
        return loss.reshape(valid.shape) if case.reduction == "none" else loss
    losses = F.cross_entropy(flat, target, class_weight, reduction="none", **options).reshape(valid.shape)
    if case.z_loss:
        losses = losses + z_loss * torch.logsumexp(z, -1).square()
    if class_weight is None:
        return reduced(case, losses, at, valid.to(z.dtype).sum())
    count = torch.where(valid, class_weight[classes], 0.0).sum()
    # F.cross_entropy's mean over class weights of 0 is nan, whatever the z-loss of those tokens is
    return reduced(case, losses, at, torch.where(count == 0.0, torch.nan, count))


def reduced(case: Case, losses: Tensor, at: Tensors, count: Tensor) -> Tensor:
    """Tokens that are ignored are left out before anything is multiplied, so that what they hold does not matter."""
    valid = at["target"] != case.ignore_index
    losses = torch.where(valid, losses, 0.0)
    if "token_weight" in at:
        losses = losses * torch.where(valid, at["token_weight"], 0.0)
    if case.reduction == "none":
        return losses
    if case.normalizer:
        return losses.sum() / normalizer_of(case, at)
    return losses.sum() / count if case.reduction == "mean" else losses.sum()


def normalizer_of(case: Case, at: Tensors) -> Tensor | float:
    numbers = {"number": 37.5, "zero": 0.0}
    return numbers[case.normalizer] if case.normalizer in numbers else at["normalizer"]


def divergences(case: Case, at: Tensors, z: Tensor, valid: Tensor) -> Tensor:
    """The sums of the definition, terms of probability 0 left out, the mixture in log space."""
    log_q = F.log_softmax(z, -1)
    if "teacher_probs" in at:
        log_p = accumulated(at["teacher_probs"]).to(log_q.dtype).log()
    else:
        scale = case.logit_scale if case.teacher_scale is None else case.teacher_scale
        teacher = logits(at["teacher_input"], at["teacher_weight"], None, scale, case.teacher_softcap)
        log_p = F.log_softmax(teacher / case.temperature, -1).to(log_q.dtype)
    log_p = torch.where(valid, log_p, log_q.detach())

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        present = log_a.exp() > 0.0  # what underflows is 0 too
        return torch.where(present, log_a.exp() * torch.where(present, log_a - log_b, 0.0), 0.0).sum(-1)

    if case.kind == "forward" or (case.kind == "jsd" and case.beta == 0.0):
        return kl(log_p, log_q)
    if case.kind == "reverse" or case.beta == 1.0:
        return kl(log_q, log_p)
    shares = torch.tensor([1.0 - case.beta, case.beta], dtype=z.dtype, device=z.device).log()
    log_m = torch.logaddexp(log_q + shares[0], log_p + shares[1])
    return case.beta * kl(log_p, log_m) + (1.0 - case.beta) * kl(log_q, log_m)
