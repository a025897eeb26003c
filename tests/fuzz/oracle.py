"""The functions in plain torch on dense (N, V) logits, as a user writes them. In float64 they are the truth.

There are two usual ways to write them. The yardstick is the more accurate one: logits leave F.linear in the operands'
dtype and become float32 at once, so that scale, cap and loss are computed in float32.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_ops.entry.rewrites import with_own_place
from flce_ops.math.sparse_gradient import SparseGradient, keep_entries
from tests.fuzz.cases import ARGMAX_METRICS, Case
from tests.fuzz.problem import Tensors, accumulated, scored_target, valid_tokens

# N tokens, K classes of a target, D hidden, V vocabulary


def call(case: Case, at: Tensors) -> Tensors:
    """Returns the outputs by name."""
    learnt = {case.learnt: at["learnt"]} if case.learnt else {}
    at = {**at, "target": scored_target(case, at["target"])}
    case = replace(case, shift=False)
    valid = valid_tokens(case, at["target"])
    # what ignored rows hold does not matter, even nan and infinite divergences
    at = {**at, "input": torch.where(valid.unsqueeze(-1), at["input"], 0.0)}
    scale, temperature = case.logit_scale, case.temperature
    if case.learnt == "logit_scale":
        scale = accumulated(at["learnt"])
    elif case.learnt == "temperature":
        scale, temperature = scale / accumulated(at["learnt"]), 1.0
    cap = learnt.get("softcap", case.softcap)
    if case.sparse:
        return {"loss": sparse_loss(case, at, valid, scale / temperature)}
    z = activated(given_logits(at) if case.function == "given_logits" else product(at), scale, cap) / temperature
    counts = at["target"] != case.ignore_index
    classes = torch.where(counts, at["target"], 0).long()
    if case.function == "policy":
        return policy(case, at, z, valid, classes)
    if case.function == "token_loss":
        return token_loss(case, at, z, valid, counts, classes)
    if case.function == "log_probs":
        log_p = F.log_softmax(z, -1)
        of_topk = log_p.gather(-1, classes if case.topk else classes.unsqueeze(-1))
        found = {
            "log_probs": torch.where(counts, of_topk if case.topk else of_topk.squeeze(-1), 0.0),
            "lse": torch.where(valid, torch.logsumexp(z, -1), 0.0),
        }
        if case.entropy:
            # p log p = 0 where a bias of -inf makes p 0
            found["entropy"] = torch.where(valid, -(log_p.exp() * log_p.masked_fill(z == -torch.inf, 0.0)).sum(-1), 0.0)
        if case.argmax:
            found["logits"] = z.detach()
        if case.tail:
            found["tail"] = tail(case, log_p, counts, classes)
        return found | metrics(case, z, valid)
    if case.function == "kl_div":
        count = valid.to(z.dtype).sum().clamp(min=1.0)  # the mean over no tokens is 0
        return {"loss": reduced(case, divergences(case, at, z, valid.unsqueeze(-1)), at, count)}
    found = {"loss": cross_entropy(case, at, z, valid, classes, learnt.get("z_loss", case.z_loss))}
    if case.function == "metrics":
        found |= {"logits": z.detach(), **metrics(case, z, valid)}
    return found


def metrics(case: Case, z: Tensor, valid: Tensor) -> Tensors:
    """The metrics that are sums over a row; they have no gradient."""
    z = z.detach()
    log_p, lse = F.log_softmax(z, -1), torch.logsumexp(z, -1)
    values = {
        "lse": lse,
        "entropy": -(log_p.exp() * log_p.masked_fill(z == -torch.inf, 0.0)).sum(-1),
        "log_sum_sq_probs": torch.logsumexp(2.0 * log_p, -1),
        "mean_logit": z.mean(-1),
        "z_loss": case.z_loss * lse.square(),
    }
    return {
        f"metric {name}": torch.where(valid, values[name], 0.0) for name in case.metrics if name not in ARGMAX_METRICS
    }


def tail(case: Case, log_p: Tensor, counts: Tensor, classes: Tensor) -> Tensor:
    """The probability of the unnamed classes. Its logarithm has the rounding errors of the named ones' probabilities
    times their share.
    """
    if not case.topk:
        counts, classes = counts.unsqueeze(-1), classes.unsqueeze(-1)
    named = torch.zeros_like(log_p).scatter_add(-1, classes, counts.to(log_p.dtype)) > 0.0
    return torch.where(counts.any(-1), log_p.exp().masked_fill(named, 0.0).sum(-1), 1.0)


def policy(case: Case, at: Tensors, z: Tensor, valid: Tensor, classes: Tensor) -> Tensors:
    log_p = F.log_softmax(z, -1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    # an ignored row's class 0 may be switched off, and the slope of a ratio at -inf is not finite
    log_p = torch.where(valid, log_p, 0.0)
    given = {name: torch.where(valid, at[name], 0.0).to(z.dtype) for name in OF_POLICY if name in at}
    advantage = given["advantages"]
    ratio = torch.exp(log_p - given.get("old_log_probs", log_p.detach()))
    clipped = ratio.clamp(1.0 - case.clip_low, 1.0 + case.clip_high)
    if case.objective == "cispo":
        losses = -clipped.detach() * advantage * log_p
    else:
        losses = torch.maximum(-advantage * ratio, -advantage * clipped)
        if case.dual_clip is not None:
            losses = torch.where(advantage < 0.0, torch.minimum(losses, -advantage * case.dual_clip), losses)
    if case.kl_factor:
        d = log_p - given["ref_log_probs"]
        estimates = {"k1": d, "k2": 0.5 * d.square(), "k3": torch.exp(-d) + d - 1.0}
        losses = losses + case.kl_factor * estimates[case.kl_estimator]
    found = {"loss": reduced(case, losses, at, valid.to(z.dtype).sum())}
    if "token_weight" not in at:  # tokens of weight 0 may be left out
        found["metric log_probs"] = log_p.detach()
    return found


def source_of(case: Case) -> str:
    """A function of one token. Its vectors have K numbers if a token has K classes."""
    loss = f"({case.formula}).sum(-1)" if case.topk else case.formula
    return (
        f"def of_token(lp, a, g{', *' * bool(case.reads)}{''.join(f', {name}' for name in case.reads)}): return {loss}"
    )


def token_loss(case: Case, at: Tensors, z: Tensor, valid: Tensor, counts: Tensor, classes: Tensor) -> Tensors:
    log_p = F.log_softmax(z, -1)
    lp = log_p.gather(-1, classes if case.topk else classes.unsqueeze(-1))
    lp = torch.where(counts, lp if case.topk else lp.squeeze(-1), -1.0)
    beside = {"lse": torch.logsumexp(z, -1), "entropy": -(log_p.exp() * log_p).sum(-1)}
    beside = {name: torch.where(valid, beside[name], 0.0) for name in case.reads}
    if case.topk:
        beside = {name: numbers.unsqueeze(-1) for name, numbers in beside.items()}
    a = torch.where(valid.unsqueeze(-1) if case.topk else valid, at["a"], 0.0).to(z.dtype)
    names: dict = {"torch": torch}
    exec(source_of(case), names)
    losses = torch.where(valid, names["of_token"](lp, a, 0.7, **beside), 0.0)
    found = {"loss": reduced(case, losses, at, valid.to(z.dtype).sum())}
    if "token_weight" not in at:
        found["metric log_probs"] = torch.where(counts, lp, 0.0).detach()
    return found


OF_POLICY = ("advantages", "old_log_probs", "ref_log_probs")


def sparse_loss(case: Case, at: Tensors, valid: Tensor, factor: float) -> Tensor:
    """Its gradient enters the operands as in the mathematics of the ATen path, entry by entry."""
    products = accumulated(F.linear(at["input"], at["weight"]))
    slopes: list[Tensor] = []

    def kept(gradient: Tensor) -> Tensor:
        rows = torch.atleast_2d(gradient).flatten(0, -2).clone()
        if not len(rows):
            return gradient
        sparse = SparseGradient(case.threshold, case.sparse, at["gradient_seed"])
        order = with_own_place(at["class_order"], case.ignore_index) if case.class_order else slice(None)
        in_order, draws = rows[:, order], torch.arange(len(rows), device=rows.device)
        keep_entries(in_order, slopes.pop().flatten() * factor, sparse, draws)
        rows[:, order] = in_order
        return rows.view_as(gradient)

    if products.requires_grad:
        products.register_hook(kept)
    u = products if "bias" not in at else products + at["bias"]
    cap = None if case.softcap is None else case.softcap / case.temperature
    z = factor * u if cap is None else cap * exact_tanh(factor * u / cap)
    lse = torch.logsumexp(z, -1)
    if lse.requires_grad:
        lse.register_hook(lambda gradient: slopes.append(gradient))
    classes = torch.where(valid, at["target"], 0).long()
    of_classes = at["class_weight"].to(z.dtype) if "class_weight" in at else z.new_ones(case.V)
    of_target = of_classes[classes]
    losses = (1.0 - case.label_smoothing) * of_target * (lse - z.gather(-1, classes.unsqueeze(-1)).squeeze(-1))
    if case.label_smoothing:
        losses = losses + case.label_smoothing * (of_classes.mean() * lse - (of_classes * z).mean(-1))
    count = torch.where(valid, of_target, 0.0).sum()
    if "class_weight" in at:
        count = torch.where(count == 0.0, torch.nan, count)
    return reduced(case, losses + case.z_loss * lse.square(), at, count)


def product(at: Tensors) -> Tensor:
    return F.linear(at["input"], at["weight"], at.get("bias"))


def given_logits(at: Tensors) -> Tensor:
    """Logits that are rounded twice, as F.linear's are under torch.func but not outside."""
    z = F.linear(at["input"], at["weight"])
    return z + at["bias"].to(z.dtype) if "bias" in at else z


def activated(u: Tensor, scale: Tensor | float, cap: Tensor | float | None) -> Tensor:
    u = accumulated(u)
    # documented: a class with a bias of -inf has no part in the scale's gradient, which would be 0 times -inf
    off = (u == -torch.inf) & isinstance(scale, Tensor)
    z = torch.where(off, u, scale * torch.where(off, 0.0, u))
    if cap is None:
        return z
    return cap * (exact_tanh(z / cap) if z.dtype == torch.float64 else torch.tanh(z / cap))


def exact_tanh(y: Tensor) -> Tensor:
    """tanh whose slope by autograd keeps its digits where it is small. torch's slope is the difference 1 - tanh^2."""
    size = torch.where(y >= 0.0, y, -y)
    exponential = torch.exp(-2.0 * size)
    far = torch.where(y >= 0.0, 1.0, -1.0) * (1.0 - exponential) / (1.0 + exponential)
    return torch.where(size < 0.5, torch.tanh(y), far)


def cross_entropy(case: Case, at: Tensors, z: Tensor, valid: Tensor, classes: Tensor, z_loss: Tensor | float) -> Tensor:
    options = {"ignore_index": case.ignore_index, "label_smoothing": case.label_smoothing}
    class_weight = at["class_weight"].to(z.dtype) if "class_weight" in at else None
    if case.topk:
        return reduced(case, soft_losses(case, at, z, classes, class_weight, z_loss), at, valid.to(z.dtype).sum())
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
    # F.cross_entropy's mean is nan if all class weights are 0, whatever the z-loss of these tokens is
    return reduced(case, losses, at, torch.where(count == 0.0, torch.nan, count))


def soft_losses(
    case: Case, at: Tensors, z: Tensor, classes: Tensor, class_weight: Tensor | None, z_loss: Tensor | float
) -> Tensor:
    # log_softmax, because p from lse - z would have the rounding errors of lse
    lse, log_p = torch.logsumexp(z, -1), F.log_softmax(z, -1)
    counts = at["target"] != case.ignore_index
    q = torch.where(counts, at["target_weight"], 0.0).to(z.dtype)
    q = q if class_weight is None else q * class_weight[classes]
    # a bias of -inf for class 0, the stand-in, must not matter here
    of_topk = torch.where(counts, log_p.gather(-1, classes), 0.0)
    losses = -(1.0 - case.label_smoothing) * (q * of_topk).sum(-1)
    if case.label_smoothing:
        below = log_p if class_weight is None else class_weight * log_p
        losses = losses - case.label_smoothing * below.mean(-1)
    return losses + z_loss * lse.square()


def reduced(case: Case, losses: Tensor, at: Tensors, count: Tensor) -> Tensor:
    """Leaves out ignored tokens before any multiplication, so that their contents do not matter."""
    valid = valid_tokens(case, at["target"])
    losses = torch.where(valid, losses, 0.0)
    if "token_weight" in at:
        weight = at["token_weight"]
        if not weight.requires_grad or case.mode in ("no_grad", "inference_mode"):
            # leaves out tokens of weight 0, also with infinite losses
            losses = torch.where((weight == 0.0) & ~losses.isfinite(), 0.0, losses)
        losses = losses * torch.where(valid, weight, 0.0)
    if case.reduction == "none":
        return losses
    if case.normalizer:
        return losses.sum() / normalizer_of(case, at)
    return losses.sum() / count if case.reduction == "mean" else losses.sum()


def normalizer_of(case: Case, at: Tensors) -> Tensor | float:
    numbers = {"number": 37.5, "zero": 0.0}
    return numbers[case.normalizer] if case.normalizer in numbers else at["normalizer"]


def divergences(case: Case, at: Tensors, z: Tensor, valid: Tensor) -> Tensor:
    """The sums of the definition, without terms of probability 0, with the mixture in log space."""
    log_q = F.log_softmax(z, -1)
    if "teacher_probs" in at:
        log_p = accumulated(at["teacher_probs"]).to(log_q.dtype).log()
    else:
        scale = case.logit_scale if case.teacher_scale is None else case.teacher_scale
        teacher = activated(F.linear(at["teacher_input"], at["teacher_weight"]), scale, case.teacher_softcap)
        log_p = F.log_softmax(teacher / case.temperature, -1).to(log_q.dtype)
    # leaves out tokens of weight 0, also with nan slopes
    if "token_weight" in at and not at["token_weight"].requires_grad:
        valid = valid & (at["token_weight"] != 0.0).unsqueeze(-1)
    log_p = torch.where(valid, log_p, log_q.detach())

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        present = log_a.exp() > 0.0  # a probability that underflows is 0 too
        return torch.where(present, log_a.exp() * torch.where(present, log_a - log_b, 0.0), 0.0).sum(-1)

    if case.kind in ("tv", "nla"):
        q, p = log_q.exp(), log_p.exp()
        return 0.5 * (p - q).abs().sum(-1) if case.kind == "tv" else -torch.minimum(log_q, log_p).logsumexp(-1)
    if case.kind == "forward" or (case.kind == "jsd" and case.beta == 0.0):
        return kl(log_p, log_q)
    if case.kind == "reverse" or case.beta == 1.0:
        return kl(log_q, log_p)
    shares = torch.tensor([1.0 - case.beta, case.beta], dtype=z.dtype, device=z.device).log()
    log_m = torch.logaddexp(log_q + shares[0], log_p + shares[1])
    return case.beta * kl(log_p, log_m) + (1.0 - case.beta) * kl(log_q, log_m)
