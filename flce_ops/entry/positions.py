"""K-dimensional losses, torch's `out_features`: linear_weight (V, d_1, ..., d_K, D) holds a head for each position.

    loss_ik = cross_entropy(linear_weight[:, k] x_i + linear_bias[:, k], target_ik)      k: one of d_1 ... d_K positions

The heads run one after the other, each without its logits. "mean" and "sum" add their losses, over one denominator.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..math.options import Statistics, TokenStatistics, accumulation_dtype, scalar
from ..math.reduction import mean_denominator, nan_for_nothing
from ..meta.checks import check_dense, check_device, check_per_class
from .arguments import OP, check_normalizer, check_reduction, check_shape
from .schemas import CrossEntropy

# D hidden, V vocabulary; (...) tokens, (d...) positions

Result = tuple[Tensor, TokenStatistics]


def losses_of_positions(
    call: CrossEntropy, asked: Statistics, of_position: Callable[[CrossEntropy, Statistics], Result]
) -> Result:
    """Runs `of_position` for each head. Each call has a linear_weight (V, D)."""
    check_positions(call)
    tokens, positions = call.input.shape[:-1], call.linear_weight.shape[1:-1]
    heads = call.linear_weight.flatten(1, -2).unbind(1)
    # expanded, because autograd sums the gradients of an expanded tensor in one operation; gradients of `input` used
    # several times would be rounded after each position
    by_position = {"linear_weight": heads, "input": call.input.expand(len(heads), *call.input.shape).unbind(0)}
    if call.linear_bias is not None:
        by_position["linear_bias"] = call.linear_bias.flatten(1).unbind(1)
    first = len(tokens) + call.target.is_floating_point()  # class probabilities are (..., V, d...)
    by_position["target"] = call.target.flatten(first).unbind(-1)
    if call.token_weight is not None:
        by_position["token_weight"] = call.token_weight.flatten(len(tokens)).unbind(-1)
    everywhere = {"reduction": "none" if call.reduction == "none" else "sum", "normalizer": denominator_of(call)}

    def result_of(k: int) -> Result:
        here = everywhere | {name: parts[k] for name, parts in by_position.items()}
        return of_position(call.changed(lambda name, value: here.get(name, value)), asked)

    losses, statistics = zip(*(result_of(k) for k in range(len(heads))))
    shape = (*tokens, *positions)
    loss = torch.stack(losses, -1).reshape(shape) if call.reduction == "none" else torch.stack(losses).sum()
    stacked = (torch.stack(found, -1).reshape(shape) if found[0] is not None else None for found in zip(*statistics))
    return loss, TokenStatistics(*stacked)


def denominator_of(call: CrossEntropy) -> Tensor | None:  # ()
    """The denominator over all positions."""
    if call.normalizer is not None or call.reduction != "mean":
        return call.normalizer
    if call.target.is_floating_point():
        return scalar(1.0, call.input) * (call.target.numel() // call.linear_weight.shape[0])
    target = call.target.flatten()
    dtype = accumulation_dtype(call.input.dtype)
    denominator = mean_denominator("mean", None, target != call.ignore_index, dtype, target, call.weight)
    return denominator if call.weight is None else nan_for_nothing(denominator)


def check_positions(call: CrossEntropy) -> None:
    """Checks the shapes, and what the denominator reads. The other checks run in the call for each position."""
    input, linear_weight, target = call.input, call.linear_weight, call.target
    check_dense(OP, linear_weight=linear_weight, linear_bias=call.linear_bias, target=target, weight=call.weight)
    num_classes, *positions, hidden = linear_weight.shape
    if input.dim() < 1 or input.shape[-1] != hidden or 0 in linear_weight.shape[:-1]:
        raise ValueError(
            f"{OP}: expected linear_weight of shape (V, d_1, ..., d_K, D) with at least one class and position, and "
            f"input of shape (..., D), got {tuple(linear_weight.shape)} and {tuple(input.shape)}"
        )
    tokens = tuple(input.shape[:-1])
    probabilities = (num_classes,) if target.is_floating_point() else ()
    for name, tensor, expected in (
        ("target", target, (*tokens, *probabilities, *positions)),
        ("linear_bias", call.linear_bias, (num_classes, *positions)),
        ("token_weight", call.token_weight, (*tokens, *positions)),
    ):
        of = f"beside linear_weight {tuple(linear_weight.shape)} and input {tuple(input.shape)}, got"
        check_shape(OP, name, tensor, expected, of)
    if call.weight is not None:
        check_per_class(OP, "weight", call.weight, num_classes)
    check_device(OP, input, target=target, weight=call.weight)
    check_reduction(OP, call.reduction)
    if call.normalizer is not None:
        check_normalizer(OP, call.normalizer, call.reduction, input)
