"""Supports as samplers leave them, and what they mean: dense logits with -inf outside the support."""

# N tokens, K ids of each, D hidden, V vocabulary

import torch
from inputs import Inputs, make_inputs
from reference_loss import dense_logits
from torch import Tensor


def draw(
    shape: tuple[int, int, int], width: int, *, without: int = 3, **made
) -> tuple[Inputs, Tensor]:  # ids (N, width)
    """Of a Zipf prior: 1 to `width` ids, the target among them; every `without`-th token has none, none if it is 0."""
    inputs = make_inputs(shape, **made)
    target, V = inputs.target, shape[2]
    generator = torch.Generator(target.device).manual_seed(int(target.clamp(min=0).sum()) + V)
    uniform = torch.rand(shape[0], V, generator=generator, device=target.device).clamp(1e-9, 1 - 1e-9)
    with torch.no_grad():
        logits = torch.nn.functional.linear(inputs.input, inputs.linear_weight, inputs.linear_bias).float()
    ids = (logits - torch.log(-torch.log(uniform))).topk(min(width, V), 1).indices  # without replacement
    ids[:, 0] = torch.where((ids == target[:, None]).any(1) | (target < 0), ids[:, 0], target)
    sizes = torch.randint(1, width + 1, (shape[0], 1), generator=generator, device=target.device)
    at = (ids == target[:, None]).int().argmax(1, keepdim=True)
    first = ids.gather(1, at)
    ids = ids.scatter(1, at, ids[:, :1])
    ids[:, :1] = first
    ids[torch.arange(ids.shape[1], device=ids.device) >= sizes] = -1
    if without:
        ids[::without] = -1
    return inputs, ids


def as_csr(ids: Tensor) -> tuple[Tensor, Tensor]:  # (..., K) -> (E,), (N + 1,)
    ids = ids.flatten(0, -2)
    lengths = (ids >= 0).sum(1)
    return ids[ids >= 0], torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def allowed(ids: Tensor, classes: int) -> Tensor:  # (..., V) bool
    found = torch.zeros(*ids.shape[:-1], classes + 1, dtype=torch.bool, device=ids.device)
    found = found.scatter(-1, torch.where(ids < 0, classes, ids).long(), True)[..., :classes]
    return found | ~found.any(-1, keepdim=True)


def dense_rows(input, linear_weight, target, linear_bias=None, *, ids, **options) -> tuple[Tensor, Tensor]:
    """log_probs and entropy, (...); 0 at ignored tokens."""
    inside = allowed(ids, linear_weight.shape[0])
    z = dense_logits(input, linear_weight, linear_bias, **options)
    if z.dtype.itemsize < 4:
        z = z.float()
    log_q = z.masked_fill(~inside, -torch.inf).log_softmax(-1)
    valid = target != -100
    log_probs = log_q.gather(-1, target.where(valid, 0).long().unsqueeze(-1)).squeeze(-1)
    finite = log_q.masked_fill(~inside, 0.0)
    entropy = -(finite.exp() * finite).masked_fill(~inside, 0.0).sum(-1)
    return log_probs.where(valid, 0.0), entropy.where(valid, 0.0)
