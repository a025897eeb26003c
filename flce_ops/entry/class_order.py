"""Reorders the classes as gradient_class_order says. A sparse gradient then forms its blocks of classes in this
order.

    order        2 0 1        the class at each place
    place        1 2 0        the place of each class; targets hold places then

This costs a copy of linear_weight, and in backward reordering its gradient. It pays if ids are not ordered by
frequency.
"""

from copy import copy
from typing import Any, cast

import torch
from torch import Tensor

from ..distributed.one_rank import any_dtensor
from ..math.options import TokenStatistics
from ..meta.checks import check_device
from ..support.torch_private import check_value
from .schemas import CrossEntropy

# N tokens, V vocabulary


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
