"""Bodies of the entry operators flce::cross_entropy, ..._metrics, and of those that may overwrite the logits, ..._.

Autocast changes nothing: whatever the logits' dtype, the loss is float32 (float64), as F.cross_entropy's there.
"""

from typing import Any

from torch import Tensor

from flce_ops.entry import logits_plain
from flce_ops.entry.schemas import LogitsCrossEntropy, LogitsCrossEntropyInPlace
from flce_ops.math.reduction import accuracy_of, count_right_and_valid, target_is_argmax
from flce_ops.meta.call import takes
from flce_ops.support.dtensor import any_dtensor


@takes(LogitsCrossEntropy)
def composite(call: LogitsCrossEntropy) -> Tensor:
    return loss_and_argmax(call, argmax=False, handed_over=False)[0]


@takes(LogitsCrossEntropyInPlace)
def composite_in_place(call: LogitsCrossEntropyInPlace) -> Tensor:
    return loss_and_argmax(call, argmax=False, handed_over=True)[0]


@takes(LogitsCrossEntropy)
def composite_metrics(call: LogitsCrossEntropy) -> tuple[Tensor, Tensor, Tensor]:
    return metrics(call, handed_over=False)


@takes(LogitsCrossEntropyInPlace)
def composite_metrics_in_place(call: LogitsCrossEntropyInPlace) -> tuple[Tensor, Tensor, Tensor]:
    return metrics(call, handed_over=True)


def metrics(call: LogitsCrossEntropy, handed_over: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, token_accuracy, argmax)."""
    target = call.target
    loss, argmax = loss_and_argmax(call, argmax=True, handed_over=handed_over)
    if any_dtensor(argmax):
        from flce_ops.entry.sharded import accuracy_and_top1  # torch.distributed.tensor: only for its users

        return loss, accuracy_and_top1(argmax, target, call.ignore_index)[0], argmax
    is_top1 = target_is_argmax(argmax, target, call.ignore_index)
    return loss, accuracy_of(count_right_and_valid(is_top1, target, call.ignore_index)), argmax


def loss_and_argmax(call: LogitsCrossEntropy, argmax: bool, handed_over: bool) -> tuple[Tensor, Any]:
    if any_dtensor(*call.values()):
        from flce_ops.entry.logits_sharded import dtensor_composite

        return dtensor_composite(call, argmax)
    return logits_plain.loss_and_argmax(call, argmax, handed_over)
