"""cross_entropy on DTensors whose tokens are sharded: each rank its own rows, then one all_reduce of the sum.

Logits sharded along their classes are refused: their head's operands, given to linear_cross_entropy, have that loss
without any logits. DTensors are not overwritten.
"""

from typing import cast

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flce_ops.distributed.layout import Layout, check_plain_target, check_same_mesh, describe, splits
from flce_ops.distributed.local import localize
from flce_ops.entry.arguments import check_logits
from flce_ops.entry.logits_plain import OP, operator_with_grad, weighted_loss, weighted_losses
from flce_ops.entry.plain import token_losses
from flce_ops.entry.schemas import LogitsCrossEntropy
from flce_ops.entry.sharded import per_token, quotient_over_tokens, sum_over_tokens
from flce_ops.math.options import LogitOperands, Statistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import mean_denominator, nan_for_nothing

# N tokens of this rank, V vocabulary


def dtensor_composite(call: LogitsCrossEntropy, argmax: bool) -> tuple[DTensor, DTensor | None]:
    """flce_ops.entry.logits_plain.loss_and_argmax when an argument is a DTensor."""
    layout = layout_of_logits(call)
    if call.target.shape != call.logits.shape[:-1]:
        check_plain_target(call.target, call.logits, OP)
    check_logits(OP, call)
    target_shape, reduction = call.target.shape, call.reduction
    logits = localize(layout, call.logits, layout.tokens)
    tokens_shape = logits.shape[:-1]
    target = localize(layout, call.target, layout.tokens).reshape(-1)
    weight = localize(layout, call.weight, layout.replicated)
    token_weight = localize(layout, call.token_weight, layout.tokens)
    normalizer = localize(layout, call.normalizer, layout.replicated, gradient=layout.placements(tokens=Partial()))
    accumulate = accumulation_dtype(logits.dtype)
    rows = logits.reshape(tokens_shape.numel(), logits.shape[-1])
    problem = token_losses(call, LogitOperands(rows, target, weight), Statistics(argmax=argmax))
    valid = problem.valid
    token_weight = None if token_weight is None else token_weight.reshape(-1).to(accumulate)
    if reduction == "none":
        losses, largest = weighted_losses(problem, valid, token_weight)
        loss = per_token(layout, losses.reshape(tokens_shape), target_shape)
    else:
        denominator = mean_denominator(reduction, normalizer, valid, accumulate, target, weight)
        if normalizer is None and denominator is not None:
            denominator = sum_over_tokens(layout, denominator).to_local()
            if weight is not None:
                denominator = nan_for_nothing(denominator)
        with_grad = operator_with_grad(rows, handed_over=False)
        local_loss, total, largest = weighted_loss(problem, valid, token_weight, denominator, with_grad)
        loss = quotient_over_tokens(layout, local_loss, total, denominator)
    return loss, per_token(layout, largest.reshape(tokens_shape), target_shape) if argmax else None


def layout_of_logits(call: LogitsCrossEntropy) -> Layout:
    logits = call.logits
    if not isinstance(logits, DTensor):
        raise ValueError(
            f"{OP}: logits are a plain tensor, but another argument is a DTensor; pass that argument's to_local() (or "
            "full_tensor()), or make the logits a DTensor on its mesh"
        )
    others = {name: getattr(call, name) for name in ("target", "weight", "token_weight", "normalizer")}
    check_same_mesh(logits, OP, **others)
    classes = logits.dim() - 1
    for placement in logits.placements:
        if splits(placement) and cast(Shard, placement).dim % logits.dim() == classes:
            raise NotImplementedError(
                f"{OP}: logits are sharded along their classes, {describe(logits)}; pass the head's operands to "
                "linear_cross_entropy, which shares its classes among ranks and makes no logits, or "
                "logits.redistribute(logits.device_mesh, [Replicate()])"
            )
    tokens = tuple(placement if splits(placement) else Replicate() for placement in logits.placements)
    return Layout(logits.device_mesh, tokens, (False,) * logits.device_mesh.ndim)
