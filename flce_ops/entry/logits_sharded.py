"""cross_entropy on DTensors: each rank its own rows or its own classes, then one all_reduce of the sum.

Row statistics of classes are exchanged (distributed/logit_shards.py), and backward makes the gradient. DTensors are not
overwritten.
"""

from typing import cast

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flce_ops.distributed.layout import Layout, check_plain_target, check_same_mesh, describe, splits
from flce_ops.distributed.local import localize
from flce_ops.distributed.logit_shards import logit_shard_losses
from flce_ops.entry.arguments import check_logits
from flce_ops.entry.logits_plain import OP, losses_from_forward, one_pass_of
from flce_ops.entry.plain import token_losses
from flce_ops.entry.schemas import LogitsCrossEntropy
from flce_ops.entry.sharded import denominator_over_tokens, per_token, quotient_over_tokens
from flce_ops.entry.weighted import weighted_loss, weighted_losses
from flce_ops.entry.weightless import without_weightless
from flce_ops.math.options import LogitOperands, Statistics
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import row_factor, weighted_sum

# N tokens of this rank, V vocabulary


def dtensor_composite(call: LogitsCrossEntropy, argmax: bool) -> tuple[DTensor, DTensor | None]:
    """flce_ops.entry.logits_plain.loss_and_argmax when an argument is a DTensor."""
    layout = layout_of_logits(call)
    if call.target.shape != call.logits.shape[:-1]:
        check_plain_target(call.target, call.logits, OP)
    check_logits(OP, call)
    target_shape, reduction = call.target.shape, call.reduction
    classes = Shard(call.logits.dim() - 1)
    own = tuple(classes if shards else token for token, shards in zip(layout.tokens, layout.vocabulary))
    logits = localize(layout, call.logits, own)
    tokens_shape, num_classes = logits.shape[:-1], call.logits.shape[-1]
    target = localize(layout, call.target, layout.tokens).reshape(-1)
    weight = localize(layout, call.weight, layout.replicated)
    token_weight = localize(layout, call.token_weight, layout.tokens)
    normalizer = localize(layout, call.normalizer, layout.replicated, gradient=layout.placements(tokens=Partial()))
    accumulate = accumulation_dtype(logits.dtype)
    rows = logits.reshape(tokens_shape.numel(), logits.shape[-1])
    problem = token_losses(call, LogitOperands(rows, target, weight), Statistics(argmax=argmax))
    valid = problem.valid
    token_weight = None if token_weight is None else token_weight.reshape(-1).to(accumulate)
    denominator = denominator_over_tokens(layout, reduction, normalizer, valid, accumulate, target, weight)

    if layout.splits_vocabulary:
        factor = row_factor(valid, token_weight, denominator, accumulate)
        losses, largest = logit_shard_losses(
            layout, without_weightless(problem, token_weight, factor, num_classes), num_classes
        )
        local_loss = losses * factor if reduction == "none" else (losses * factor).sum()
        total = weighted_sum(valid, token_weight, losses)
    elif reduction == "none":
        local_loss, largest = weighted_losses(problem, valid, token_weight, losses_from_forward)
    else:
        with_grad = one_pass_of(rows, handed_over=False)
        local_loss, total, largest = weighted_loss(
            problem, valid, token_weight, denominator, losses_from_forward, with_grad
        )
    if reduction == "none":
        loss = per_token(layout, local_loss.reshape(tokens_shape), target_shape)
    else:
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
    tokens, vocabulary = [], []
    for placement in logits.placements:
        of_classes = splits(placement) and cast(Shard, placement).dim % logits.dim() == logits.dim() - 1
        if of_classes and type(placement) is not Shard:
            raise NotImplementedError(
                f"{OP}: logits are sharded along their classes in strides, {describe(logits)}, which is not "
                "implemented; pass logits.redistribute(placements=[Shard(-1)]) or [Replicate()]"
            )
        vocabulary.append(of_classes)
        tokens.append(placement if splits(placement) and not of_classes else Replicate())
    return Layout(logits.device_mesh, tuple(tokens), tuple(vocabulary))
