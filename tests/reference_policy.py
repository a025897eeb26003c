"""The references for linear_policy_loss: the formulas on dense logits, as trainers write them."""

# N tokens, D hidden, V vocabulary

import torch
from inputs import make_inputs
from reference_loss import dense_logits
from torch import Tensor

from flce_ops.objectives.policy import PolicyNumbers, PolicyTokens, policy_of


def token_losses(
    log_probs: Tensor,  # (...), and so are the others
    advantages: Tensor,
    old_log_probs: Tensor | None,
    ref_log_probs: Tensor | None,
    *,
    objective: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
) -> Tensor:
    ratio = torch.exp(log_probs - (log_probs.detach() if old_log_probs is None else old_log_probs))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if objective == "cispo":
        losses = -clipped.detach() * advantages * log_probs
    else:
        losses = torch.maximum(-advantages * ratio, -advantages * clipped)
        if dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    if beta:
        d = log_probs - ref_log_probs
        kl = {"k1": d, "k2": 0.5 * d**2, "k3": torch.exp(-d) + d - 1}[kl_estimator]
        losses = losses + beta * kl
    return losses


def dense_log_probs(input, linear_weight, target, linear_bias=None, *, ignore_index=-100, **logit_options) -> Tensor:
    """From logits in the operands' dtype, with the softmax in float32 or float64."""
    logits = dense_logits(input, linear_weight, linear_bias, **logit_options)
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    y = torch.where(target == ignore_index, 0, target).long()
    return torch.log_softmax(logits, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


LOGITS = ("softcap", "logit_scale", "temperature", "ignore_index")


def plain_policy_loss(
    input,
    linear_weight,
    target,
    advantages,
    old_log_probs=None,
    ref_log_probs=None,
    linear_bias=None,
    *,
    reduction="mean",
    token_weight=None,
    normalizer=None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Returns (loss, log_probs), in float64 for float64 operands."""
    logits = {name: options.pop(name) for name in LOGITS if name in options}
    log_probs = dense_log_probs(input, linear_weight, target, linear_bias, **logits)
    valid = target != logits.get("ignore_index", -100)
    dtype = log_probs.dtype
    numbers = [None if t is None else t.to(dtype) for t in (advantages, old_log_probs, ref_log_probs)]
    losses = torch.where(valid, token_losses(log_probs, *numbers, **options), 0.0)
    if token_weight is not None:
        losses = losses * token_weight
    log_probs = torch.where(valid, log_probs, 0.0).detach()
    if reduction == "none":
        return losses, log_probs
    if normalizer is not None:
        return losses.sum() / normalizer, log_probs
    return losses.sum() / valid.sum() if reduction == "mean" else losses.sum(), log_probs


def function_of_policy(call, **options) -> tuple[str, list[Tensor]]:
    """The name and the tensors of the token function that linear_policy_loss calls."""
    tokens = PolicyTokens(*(call.get(name) for name in PolicyTokens._fields))
    function, tensors = policy_of("linear_policy_loss", PolicyNumbers(**options), tokens, call["input"])
    return function.name, list(tensors)


LOG_RATIOS = (-0.7, -0.1, 0.1, 0.6, 1.6)  # further from log 0.8, log 1.28 and log 3 than the error of half logits


def make_policy(shape, *, dtype=torch.float32, device="cpu", on_policy=False, logits=None, **made):
    """{argument: tensor}, with ratios on all sides of the bounds, for advantages of both signs."""
    inputs = make_inputs(shape, dtype=dtype, device=device, **made)
    operands = {"input": inputs.input, "linear_weight": inputs.linear_weight, "linear_bias": inputs.linear_bias}
    operands = {name: None if t is None else t.detach() for name, t in operands.items()}
    exact = [None if t is None else t.double() for t in operands.values()]
    log_probs = dense_log_probs(exact[0], exact[1], inputs.target, exact[2], **(logits or {}))
    choice = torch.randint(len(LOG_RATIOS), inputs.target.shape, device=device)
    distance = torch.tensor(LOG_RATIOS, device=device)[choice] + 0.02 * torch.randn(log_probs.shape, device=device)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    call = {
        **operands,
        "target": inputs.target,
        "advantages": torch.randn(log_probs.shape, device=device, dtype=accumulate),
        "old_log_probs": None if on_policy else (log_probs - distance).to(accumulate),
        "ref_log_probs": (log_probs + 0.5 * torch.randn(log_probs.shape, device=device)).to(accumulate),
    }
    if inputs.token_weight is not None:
        call["token_weight"] = inputs.token_weight.detach()
    return call


def cancellation(call, **options) -> float:
    """The factor by which the sum of the token losses would be larger if all had the same sign.

    With much cancellation, the error of one random sum says little about that of another, whatever the errors of the
    terms.
    """
    losses = run_policy(plain_policy_loss, call, dtype=torch.float64, **options | {"reduction": "none"})["loss"]
    return float(losses.abs().sum() / losses.sum().abs())


WANTED = ("input", "linear_weight", "linear_bias", "token_weight")


def run_policy(function, call, cotangent=None, *, dtype=None, **options):
    """{"loss", "log_probs", a gradient for each floating-point operand and for token_weight}, on fresh leaves."""
    fresh = {}
    for name, tensor in call.items():
        if tensor is None:
            continue
        tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        fresh[name] = tensor.detach().clone().requires_grad_(name in WANTED)
    loss, log_probs = function(**fresh, **options)
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent.to(loss.dtype))
    gradients = {name: fresh[name].grad for name in WANTED if name in fresh}
    return {"loss": loss.detach(), "log_probs": log_probs, **gradients}
