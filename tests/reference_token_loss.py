"""The reference for linear_token_loss: the function on the numbers of dense logits, one token after the other."""

# N tokens, K classes of each, D hidden, V vocabulary

import torch
from inputs import make_inputs
from reference_loss import dense_logits

LOGITS = ("softcap", "logit_scale", "temperature")


def dense_token_loss(
    input, linear_weight, target, function, *tensors, linear_bias=None, reduction="mean", token_weight=None,
    normalizer=None, reads=(), **options,
):  # fmt: skip
    """(loss, log_probs) of N tokens."""
    tensors = [t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=input.dtype) for t in tensors]
    logits = dense_logits(input, linear_weight, linear_bias, **options)
    lse, counts = logits.logsumexp(-1), target != -100
    columns = target.clamp(min=0).view(target.shape[0], -1)
    log_probs = (logits.gather(1, columns) - lse[:, None]).view(target.shape)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    beside, losses = {"lse": lse, "entropy": entropy}, []
    for i in range(target.shape[0]):
        if not counts[i].any():
            losses.append(log_probs.new_zeros(()))
            continue
        own = torch.where(counts[i], log_probs[i], -1.0)
        of_token = [tensor[i] if tensor.dim() else tensor for tensor in tensors]
        losses.append(function(own, *of_token, **{name: beside[name][i] for name in reads}))
    losses = torch.stack(losses)
    valid = counts if counts.dim() == 1 else counts.any(1)
    if token_weight is not None:
        losses = losses * token_weight
    log_probs = torch.where(counts, log_probs, 0.0).detach()
    if reduction == "none":
        return losses, log_probs
    divisor = normalizer if normalizer is not None else valid.sum() if reduction == "mean" else 1.0
    return losses.sum() / divisor, log_probs


def make_call(shape, *, dtype=torch.float64, device="cpu", topk=0, **made):
    """{argument: tensor}. A target of several classes has ignored ones among them."""
    inputs = make_inputs(shape, dtype=dtype, device=device, **made)
    target = inputs.target
    if topk:
        target = torch.randint(shape[2], (shape[0], topk), device=device)
        target[::5] = -100
        target[1::3, 0] = -100
    call = {"input": inputs.input, "linear_weight": inputs.linear_weight, "target": target}
    call |= {"linear_bias": inputs.linear_bias, "token_weight": inputs.token_weight}
    return {name: None if tensor is None else tensor.detach() for name, tensor in call.items()}


WANTED = ("input", "linear_weight", "linear_bias", "token_weight")


def run(loss_of, call, function, *tensors, dtype=None, cotangent=None, **options):
    """The results and the gradients by name, on new leaves."""
    fresh = {}
    for name, tensor in call.items():
        if tensor is not None:
            tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            fresh[name] = tensor.detach().clone().requires_grad_(name in WANTED)
    to = [
        t.to(dtype) if dtype is not None and isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in tensors
    ]
    positional = [fresh.pop(name) for name in ("input", "linear_weight", "target")]
    loss, log_probs = loss_of(*positional, function, *to, **fresh, **options)
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent.to(loss.dtype))
    leaves = dict(zip(("input", "linear_weight"), positional)) | fresh
    return {"loss": loss.detach(), "log_probs": log_probs} | {n: leaves[n].grad for n in WANTED if n in leaves}
