"""Refusals of the public function's arguments by name, before any work and without reading tensor data."""

from numbers import Integral

import torch
from torch import Tensor

from flce_ops.entry.schemas import CrossEntropy, LogitsCrossEntropy, LogProbs, PolicyLoss
from flce_ops.math import options
from flce_ops.math.scalars import Number
from flce_ops.meta.checks import (
    check_dense,
    check_device,
    check_linear,
    check_per_class,
    check_real,
    check_supported_dtype,
    check_target_dtype,
)
from flce_ops.objectives import class_probabilities, cross_entropy, policy
from flce_ops.support.differentiated import has_tangent

OP = "linear_cross_entropy"
RANGES = options.RANGES | cross_entropy.RANGES | policy.RANGES
REDUCTIONS = ("none", "mean", "sum")


def check_arguments(call: CrossEntropy) -> None:
    check_dense(OP, weight=call.weight, token_weight=call.token_weight, normalizer=call.normalizer)
    check_head(OP, call)
    if call.weight is not None:
        check_per_class(OP, "weight", call.weight, call.linear_weight.shape[0])
    check_target_weight(call)
    check_loss(OP, call, call.input, "input")


def check_target_weight(call: CrossEntropy) -> None:
    """Of a soft target: a weight for each of the K classes of a token."""
    target, target_weight = call.target, call.target_weight
    if target_weight is None:
        return
    check_dense(OP, target_weight=target_weight)
    if not target_weight.dtype.is_floating_point:
        raise TypeError(f"{OP}: expected target_weight in a floating dtype, got {target_weight.dtype}")
    if target_weight.shape != target.shape:
        raise ValueError(
            f"{OP}: expected target_weight of target's shape {tuple(target.shape)}, one weight per class, got "
            f"{tuple(target_weight.shape)}"
        )
    if (target_weight.requires_grad and torch.is_grad_enabled()) or has_tangent(target_weight):
        raise NotImplementedError(f"{OP}: target_weight gets no gradient; pass target_weight.detach()")
    check_device(OP, call.input, target_weight=target_weight)


def check_logits(op: str, call: LogitsCrossEntropy) -> None:
    """The arguments of a loss of given logits."""
    logits, target, weight = call.logits, call.target, call.weight
    check_dense(op, logits=logits, target=target, weight=weight, token_weight=call.token_weight)
    check_dense(op, normalizer=call.normalizer)
    check_supported_dtype(op, "logits", logits)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{op}: expected logits of shape (..., V) with at least one class, got {tuple(logits.shape)}")
    check_target_dtype(op, target)
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op}: expected target of shape {tuple(logits.shape[:-1])}, one class index per row of logits "
            f"{tuple(logits.shape)}, got {tuple(target.shape)}"
        )
    if weight is not None:
        check_per_class(op, "weight", weight, logits.shape[-1], "classes of logits")
    check_device(op, logits, "logits", target=target)
    check_ranges(op, **call.numbers._asdict())
    check_loss(op, call, logits, "logits")


def check_loss(op: str, call: CrossEntropy | LogitsCrossEntropy, input: Tensor, of: str) -> None:
    """What a loss of tokens adds up and divides by; `of` is the name of input."""
    weight, token_weight = call.weight, call.token_weight
    check_device(op, input, of, weight=weight, token_weight=token_weight)
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{op}: weight (class weights) gets no gradient; pass weight.detach()")
    check_reduction(op, call.reduction)
    check_real(op, token_weight=token_weight)
    tokens = input.shape[:-1]
    if token_weight is not None and token_weight.shape != tokens:
        raise ValueError(
            f"{op}: expected token_weight of shape {tuple(tokens)}, one factor per token, "
            f"got {tuple(token_weight.shape)}"
        )
    check_normalizer(op, call.normalizer, call.reduction, input, of)


def check_head(op: str, call: CrossEntropy | LogProbs | PolicyLoss) -> None:
    """The arguments that make logits, and the targets among them."""
    input, linear_weight, target, linear_bias = call.input, call.linear_weight, call.target, call.linear_bias
    check_dense(op, input=input, linear_weight=linear_weight, target=target, linear_bias=linear_bias)
    if input.dim() < 1:
        raise ValueError(f"{op}: expected input of shape (..., D), got a 0-d tensor")
    check_linear(op, input, linear_weight, linear_bias)
    if isinstance(call, CrossEntropy) and target.is_floating_point():
        check_class_probabilities(call)
    elif isinstance(call, CrossEntropy):
        check_class_indices(op, target, input, slots=call.target_weight is not None)
    else:
        check_class_indices(op, target, input, slots=isinstance(call, LogProbs) and target.dim() == input.dim())
    check_device(op, input, linear_weight=linear_weight, target=target, linear_bias=linear_bias)
    check_ranges(op, **call.numbers._asdict())


def check_class_indices(op: str, target: Tensor, input: Tensor, *, slots: bool) -> None:
    """(...), or with `slots` (..., K)."""
    check_target_dtype(op, target)
    tokens = tuple(input.shape[:-1])
    if slots and (target.shape[:-1] != tokens or target.dim() != input.dim() or not target.shape[-1]):
        raise ValueError(
            f"{op}: expected target of shape {tokens} + (K,), K class indices (at least one) per token of input "
            f"{tuple(input.shape)}, got {tuple(target.shape)}"
        )
    if not slots and target.shape != tokens:
        several = target.dim() == input.dim() and target.shape[:-1] == tokens
        hint = "; several classes a token need target_weight, a weight for each" if several and op == OP else ""
        raise ValueError(
            f"{op}: expected target of shape {tokens}, one class index per token of input "
            f"{tuple(input.shape)}, got {tuple(target.shape)}{hint}"
        )


def check_class_probabilities(call: CrossEntropy) -> None:
    """A floating target."""
    target, tokens, num_classes = call.target, call.input.shape[:-1], call.linear_weight.shape[0]
    if call.target_weight is not None:
        raise TypeError(
            f"{OP}: target_weight stands beside a target of class indices, of shape {tuple(tokens)} + (K,), but target "
            f"has dtype {target.dtype}; class probabilities are weights themselves: leave target_weight out"
        )
    if target.shape != (*tokens, num_classes):
        raise TypeError(
            f"{OP}: expected target of class indices in int64 or int32, of shape {tuple(tokens)}, or of class "
            f"probabilities, of shape {(*tokens, num_classes)}; got {target.dtype} of shape {tuple(target.shape)}"
        )
    if (target.requires_grad and torch.is_grad_enabled()) or has_tangent(target):
        raise NotImplementedError(f"{OP}: target (class probabilities) gets no gradient; pass target.detach()")
    if call.ignore_index != -100:
        raise ValueError(
            f"{OP}: ignore_index is a class index, but target holds class probabilities; leave it out (got "
            f"{call.ignore_index}), and give tokens that do not count a token_weight of 0"
        )
    undeclared = set(cross_entropy.LossOptions._fields) - set(class_probabilities.OPTIONS)
    for name in sorted(undeclared):
        if getattr(call.numbers, name) != cross_entropy.LossNumbers._field_defaults[name]:
            raise NotImplementedError(
                f"{OP}: {name} is not implemented for a target of class probabilities"
                + ("; add it from linear_log_probs' lse" if name == "z_loss" else "")
            )


def check_ranges(op: str, **numbers: Number | None) -> None:
    for name, number in numbers.items():
        if number is None or name not in RANGES:
            continue
        expected, fits = RANGES[name]
        if not fits(number):
            raise ValueError(f"{op}: {expected}, got {number}")


def check_reduction(op: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: expected reduction to be one of {', '.join(REDUCTIONS)}, got {reduction!r}")


def check_ignore_index(op: str, ignore_index: int | None) -> None:
    if ignore_index is not None and not isinstance(ignore_index, Integral):
        raise TypeError(f"{op}: expected ignore_index to be an integer or None, got {ignore_index!r}")


def resolve_ignore_index(op: str, ignore_index: int | None, target: Tensor | None) -> int:
    """None is the default of torch.nn.functional.linear_cross_entropy, and means -100 there; no class is negative."""
    if ignore_index is None:
        return -100
    beyond_int32 = isinstance(ignore_index, int) and not -(2**31) <= ignore_index < 2**31
    # compared with such targets it would wrap around, 2^32 - 100 to -100
    if beyond_int32 and target is not None and target.dtype == torch.int32:
        raise ValueError(f"{op}: expected ignore_index in the range of target's dtype torch.int32, got {ignore_index}")
    return ignore_index


def check_normalizer(op: str, normalizer: Tensor | None, reduction: str, input: Tensor, of: str = "input") -> None:
    if normalizer is None:
        return
    if reduction == "none":
        raise ValueError(f"{op}: normalizer divides a sum, so it needs reduction='mean' or 'sum', got 'none'")
    if normalizer.dim() != 0:
        raise ValueError(
            f"{op}: expected normalizer to be a number or a 0-d tensor, got shape {tuple(normalizer.shape)}"
        )
    check_real(op, normalizer=normalizer)
    if normalizer.device.type != "cpu":
        check_device(op, input, of, normalizer=normalizer)
