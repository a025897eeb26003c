"""The references of the tests: the loss on dense (N, V) logits, written from its definition, and error measures."""

# N tokens, D hidden, V vocabulary

import torch
import torch.nn.functional as F
from inputs import Inputs
from torch import Tensor


def dense_logits(input, linear_weight, linear_bias=None, *, softcap=None, logit_scale=1.0, temperature=1.0):
    logits = logit_scale * F.linear(input, linear_weight, linear_bias)
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.unsqueeze(-1)
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def reference_loss(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    weight: Tensor | None = None,  # (V,)
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """The definition, term by term. It does not use F.cross_entropy."""
    z = dense_logits(input, linear_weight, linear_bias, softcap=softcap, logit_scale=logit_scale)
    V = linear_weight.shape[0]
    lse = torch.logsumexp(z, -1)
    valid = target != ignore_index
    y = torch.where(valid, target, 0).long()
    w = torch.ones(V, dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    target_logit = z.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    losses = (1 - label_smoothing) * w[y] * (lse - target_logit)
    if label_smoothing:
        losses = losses + label_smoothing / V * (w * (lse.unsqueeze(-1) - z)).sum(-1)
    if z_loss:
        losses = losses + z_loss * lse.square()
    if token_weight is not None:
        losses = losses * token_weight
    losses = torch.where(valid, losses, 0.0)
    if reduction == "none":
        return losses
    if normalizer is not None:
        return losses.sum() / normalizer
    return losses.sum() / torch.where(valid, w[y], 0.0).sum() if reduction == "mean" else losses.sum()


def plain_loss(input, linear_weight, target, linear_bias=None, **options) -> Tensor:
    """What a user writes without this package: logits in the inputs' dtype, and the loss on their float32 copy.

    F.cross_entropy on bf16 logits also rounds the loss. Converting to float32 first is more accurate, so it is the
    harder one to match.
    """
    scores = {name: options.pop(name) for name in ("softcap", "logit_scale") if name in options}
    return loss_of_logits(dense_logits(input, linear_weight, linear_bias, **scores), target, **options)


def loss_of_logits(logits, target, **options) -> Tensor:
    z_loss, token_weight = options.pop("z_loss", 0.0), options.pop("token_weight", None)
    normalizer, reduction = options.pop("normalizer", None), options.pop("reduction", "mean")
    weight, ignore_index = options.pop("weight", None), options.get("ignore_index", -100)
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    weight = None if weight is None else weight.to(logits.dtype)
    flat, target = logits.reshape(-1, logits.shape[-1]), target.long()
    losses = F.cross_entropy(flat, target.reshape(-1), weight, reduction="none", **options).view(target.shape)
    valid = target != ignore_index
    if z_loss:
        losses = losses + torch.where(valid, z_loss * torch.logsumexp(logits, -1).square(), 0.0)
    if token_weight is not None:
        losses = torch.where(valid, losses * token_weight, 0.0)
    if reduction == "none":
        return losses
    if normalizer is not None:
        return losses.sum() / normalizer
    if reduction == "sum":
        return losses.sum()
    counted = (
        valid.to(logits.dtype) if weight is None else torch.where(valid, weight[torch.where(valid, target, 0)], 0.0)
    )
    return losses.sum() / counted.sum()


def run(loss_function, inputs: Inputs, cotangent: Tensor | None = None, **options) -> dict[str, Tensor]:
    """Loss and gradients of one call on fresh leaves: {"loss": ..., "input": ..., "linear_weight": ..., ...}."""
    inputs = inputs.clone()
    loss = loss_function(*inputs.args, **inputs.options, **options)
    loss.backward(torch.ones_like(loss) if cotangent is None else cotangent.to(loss.dtype))
    return {"loss": loss.detach(), **{name: leaf.grad for name, leaf in inputs.leaves.items()}}


def run_reference(inputs: Inputs, cotangent: Tensor | None = None, **options) -> dict[str, Tensor]:
    """Loss and gradients in float64, on the same numbers that the operator gets."""
    return run(reference_loss, inputs.clone(torch.float64), cotangent, **options)


def with_lse(results) -> list[Tensor]:
    """Results of a forward operator with lse, (N,), in place of its lse_pair: each path chooses the reference."""
    target_logit, pair, *others = results
    return [target_logit, pair.sum(1), *others]


def as_pair(lse: Tensor) -> Tensor:  # (N,) -> (N, 2)
    return torch.stack([lse, torch.zeros_like(lse)], 1)


def error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference divided by the norm of `exact`; absolute if `exact` is 0. nan and inf must agree."""
    assert found.shape == exact.shape, f"{tuple(found.shape)} against {tuple(exact.shape)}"
    if found.numel() == 0:
        return 0.0
    found, exact = found.detach().double(), exact.detach().double()
    finite = exact.isfinite()
    if not torch.equal(found.where(~finite, 0.0).nan_to_num(7.0), exact.where(~finite, 0.0).nan_to_num(7.0)):
        return float("inf")
    found, exact = found.where(finite, 0.0), exact.where(finite, 0.0)
    scale = exact.norm()
    difference = (found - exact).norm()
    return float(difference / scale) if scale > 0 else float(difference)


def rows_apart(found: Tensor, expected: Tensor) -> int:
    """How many rows, or numbers of a vector, differ by over 1e-5 of the whole. In a sparse gradient, rounding may put
    a probability on the other side of a threshold. Then other entries are kept, of one token and one or two classes.
    """
    found, expected = (torch.atleast_1d(each.double()).unsqueeze(-1).flatten(1) for each in (found, expected))
    return int((~((found - expected).norm(dim=1) <= 1e-5 * expected.norm())).sum())
