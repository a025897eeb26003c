"""Arguments that become other arguments, before a loss is computed.

    shift                    unshifted labels: position t is scored against the label of position t + 1
    K-dimensional losses     a head for each position: one call for each
    gradient_class_order     the classes of a sparse gradient in the user's order: moved operands
    a scale that is a tensor logit_scale or temperature, which may get a gradient: learnt_scale

Labels of a sequence are shifted for each sequence, the last dimension of labels. Only one small tensor is made. Hidden
states, logits and results keep their length; the last position is an ignored token like any other:

    labels    a b c d        target    b c d ignored

K-dimensional losses are torch's `out_features`: linear_weight (V, d_1, ..., d_K, D) holds a head for each position. The
heads run one after the other, each without its logits. "mean" and "sum" add their losses, over one denominator.

    loss_ik = cross_entropy(linear_weight[:, k] x_i + linear_bias[:, k], target_ik)      k: one of d_1 ... d_K positions

A sparse gradient forms its blocks of classes in the order of gradient_class_order. This costs a copy of linear_weight,
and in backward reordering its gradient. It pays if ids are not ordered by frequency.

    order        2 0 1        the class at each place
    place        1 2 0        the place of each class; targets hold places then

A scale stays a tensor on its device. The inner operators multiply float32 products by it, as by a number, so hidden
states are not rounded again. They sum G_ij u_ij before the gradients are rounded.

    z_ij = scale u_ij        scale = logit_scale / temperature        d loss / d scale = sum_ij G_ij u_ij / scale
"""

import math
from collections.abc import Callable
from copy import copy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed import any_dtensor
from ..math.options import Number, Statistics, TokenStatistics, accumulation_dtype, scalar
from ..math.token_weights_and_denominator import mean_denominator, nan_for_nothing
from ..meta.arguments import CrossEntropy
from ..meta.checks import check_dense, check_device, check_per_class
from ..support.refusals import refuse_hole
from ..support.torch_private import check_value
from .arguments import OP, check_normalizer, check_reduction, check_shape, resolve_ignore_index

# N tokens, T tokens of a sequence, D hidden, V vocabulary; (...) tokens, (d...) positions


def shifted_target(
    op: str,
    labels: Tensor | None,  # (..., T)
    rows: Tensor,  # (..., T, D) hidden states, or (..., T, V) logits
    ignore_index: int | None,
) -> Tensor:  # (..., T)
    if labels is None:
        raise ValueError(f"{op}: shift=True expects the labels that are shifted, got target=None; pass target")
    check_dense(op, target=labels)
    if labels.is_floating_point() or labels.dim() == 0 or labels.dim() != rows.dim() - 1:
        raise ValueError(
            f"{op}: shift=True expects target to be class indices of shape (..., T), one per token of "
            f"{tuple(rows.shape)}, got {labels.dtype} of shape {tuple(labels.shape)}; shift other targets yourself"
        )
    ignore_index = resolve_ignore_index(op, ignore_index, labels)
    return shifted_shards(op, labels, ignore_index) if any_dtensor(labels) else next_labels(labels, ignore_index)


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:  # (..., T) -> (..., T)
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # pad before slicing: this order works for T = 0


def shifted_shards(op: str, labels: Tensor, ignore_index: int) -> Tensor:
    """Shifts a DTensor whose ranks hold whole sequences. The layout of input does not matter."""
    from torch.distributed.tensor import DTensor, Shard  # imported here, for users of DTensors only

    from ..distributed.layout import describe, globalize, splits

    assert isinstance(labels, DTensor)
    for ranks, placement in zip(labels.device_mesh.shape, labels.placements):
        if ranks > 1 and splits(placement) and cast(Shard, placement).dim % labels.dim() == labels.dim() - 1:
            refuse_hole(op, "shift over ranks", layout=describe(labels))
    local = next_labels(labels.to_local(), ignore_index)
    return globalize(labels.device_mesh, local.contiguous(), labels.placements, labels.shape)


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
    everywhere = {
        "reduction": "none" if call.reduction == "none" else "sum",
        "normalizer": denominator_of_positions(call),
    }

    def result_of(k: int) -> Result:
        here = everywhere | {name: parts[k] for name, parts in by_position.items()}
        return of_position(call.changed(lambda name, value: here.get(name, value)), asked)

    losses, statistics = zip(*(result_of(k) for k in range(len(heads))))
    shape = (*tokens, *positions)
    loss = torch.stack(losses, -1).reshape(shape) if call.reduction == "none" else torch.stack(losses).sum()
    stacked = (torch.stack(found, -1).reshape(shape) if found[0] is not None else None for found in zip(*statistics))
    return loss, TokenStatistics(*stacked)


def denominator_of_positions(call: CrossEntropy) -> Tensor | None:  # ()
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


def check_class_order(op: str, call: CrossEntropy) -> None:
    """Checks the order, whether a gradient is wanted or not."""
    order = call.gradient_class_order
    if order is None:
        return
    if not call.sparse.gradient_threshold:
        raise ValueError(
            f"{op}: gradient_class_order orders the classes of a sparse gradient, but gradient_threshold is 0; pass "
            "gradient_threshold, or leave gradient_class_order out"
        )
    num_classes = call.linear_weight.shape[0] if call.linear_weight.dim() else 0
    expected = f"{op}: expected gradient_class_order to be a permutation of the {num_classes} classes, ({num_classes},)"
    if order.dtype != torch.int64 or order.shape != (num_classes,):
        raise ValueError(f"{expected} in torch.int64, got {tuple(order.shape)} in {order.dtype}")
    check_device(op, call.input, gradient_class_order=order)
    if any_dtensor(order):
        order = cast(Any, order).full_tensor()
    ids = torch.arange(num_classes, device=order.device)
    inside = order.clamp(0, num_classes - 1)
    # if the order names a class twice, only one of the two places is found again
    found = torch.zeros_like(order).scatter_(0, inside, ids)[inside] == ids
    check_value((found & (inside == order)).all(), f"{expected}, got an id twice or one outside")


def in_class_order(call: CrossEntropy) -> CrossEntropy:
    """A copy of `call` with operands in the order. Accuracy is computed from the original call's target."""
    assert call.gradient_class_order is not None
    call = copy(call)
    call.gradient_class_order = order = with_own_place(call.gradient_class_order, call.ignore_index)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    ignored = call.target == call.ignore_index
    # a class out of range stays out of range, so that the operator refuses it
    inside = ~ignored & (call.target >= 0) & (call.target < order.shape[0])
    moved = place[torch.where(inside, call.target, 0).long()].to(call.target.dtype)
    call.target = torch.where(inside, moved, call.target)
    call.linear_weight = moved_rows(call.linear_weight, place)
    if call.linear_bias is not None:
        call.linear_bias = moved_rows(call.linear_bias, place)
    if call.weight is not None:
        call.weight = moved_rows(call.weight, place)
    return call


def with_own_place(order: Tensor, ignored: int) -> Tensor:
    """If ignore_index is a class, moves that class to the place with its own id, so that no other target becomes
    ignore_index.
    """
    if not 0 <= ignored < order.shape[0]:
        return order
    swapped = torch.where(order == ignored, order[ignored], order)
    return torch.where(torch.arange(order.shape[0], device=order.device) == ignored, ignored, swapped)


def moved_rows(rows: Tensor, place: Tensor) -> Tensor:
    """rows.index_select(0, order). The backward of index_select fills a tensor with zeros and adds rows to it; the
    backward of this function selects rows.
    """
    return rows.new_empty(rows.shape).index_copy_(0, place, rows)


def in_order_of_ids(statistics: TokenStatistics, order: Tensor) -> TokenStatistics:
    """Maps the argmax back to ids of classes; -1 stays."""
    argmax = statistics.argmax
    if argmax is None:
        return statistics
    return statistics._replace(argmax=torch.where(argmax >= 0, order[argmax.clamp(min=0)], argmax))


# A scale of 0 is replaced by this number, because the gradient is divided by the scale.
TINY = 1e-20


def with_learnt_scale(op: str, given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The entry operator's arguments for those of a public function, of which logit_scale or temperature is a tensor.

    The tensor becomes `learnt_scale`, and a number that it replaces becomes 1.
    """
    rows = given["input" if "input" in given else "logits"]
    logit_scale, temperature, softcap = ((defaults | given)[n] for n in ("logit_scale", "temperature", "softcap"))
    if isinstance(temperature, Tensor):
        check_temperature(op, temperature, rows, softcap, "input" in given)
        logit_scale, temperature = logit_scale / temperature.to(accumulation_dtype(rows.dtype)), 1.0
    check_scale(op, "logit_scale", logit_scale, rows)
    scale = logit_scale.to(accumulation_dtype(rows.dtype))
    scale = torch.where(scale == 0.0, scale + TINY, scale)
    return {**given, "logit_scale": 1.0, "temperature": temperature, "learnt_scale": scale}


def check_temperature(op: str, temperature: Tensor, rows: Tensor, softcap: Number | None, of_head: bool) -> None:
    if temperature.numel() != 1:
        refuse_hole(op, "temperature of tokens")
    if op == "linear_kl_div" or not of_head:
        raise TypeError(
            f"{op}: expected temperature to be a number, got a tensor; no gradient is computed for temperature, so "
            "pass its value: temperature.item()"
        )
    check_scale(op, "temperature", temperature, rows)
    if softcap is not None:
        refuse_hole(op, "temperature and softcap")
    check_value(
        (temperature > 0.0) & (temperature < math.inf),
        f"{op}: expected temperature to be positive and finite, got a tensor that holds another number",
    )


def check_scale(op: str, name: str, scale: Tensor, rows: Tensor) -> None:
    if any_dtensor(scale):
        refuse_hole(op, "scale of DTensors", name=name)
    if scale.dim() != 0:
        hint = f"; pass {name}.reshape(())" if scale.numel() == 1 else ""
        raise ValueError(f"{op}: expected {name} to be a number or a 0-d tensor, got shape {tuple(scale.shape)}{hint}")
    if scale.is_complex() or scale.dtype == torch.bool:
        raise TypeError(f"{op}: expected {name} to be real, got {scale.dtype}")
    if scale.device.type != "cpu":
        check_device(op, rows, "input", **{name: scale})
