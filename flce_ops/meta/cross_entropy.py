"""Checks and uninitialised results of each operator of given logits: its fake kernel, called by the real ones."""

import torch
from torch import Tensor

from flce_ops.math.options import LogitOperands
from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.arguments import LogitsBackward, LogitsForward, LogitsWithGrad, LogitsWithGradInPlace
from flce_ops.meta.call import takes
from flce_ops.meta.checks import (
    check_denominator,
    check_dense,
    check_device,
    check_per_class,
    check_per_row,
    check_supported_dtype,
    check_target_dtype,
)

# N tokens, V vocabulary


def check_operands(op: str, operands: LogitOperands) -> None:
    check_dense(op, **operands._asdict())
    logits, target, weight = operands
    check_supported_dtype(op, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise ValueError(f"{op}: expected logits of shape (N, V) with at least one class, got {tuple(logits.shape)}")
    check_target_dtype(op, target)
    check_per_row(op, logits, "logits", target=target)
    if weight is not None:
        check_per_class(op, "weight", weight, logits.shape[1], "logits.T")
    check_device(op, logits, "logits", target=target, weight=weight)


@takes(LogitsForward)
def forward_outputs(call: LogitsForward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """target_logit, lse, logit_sum, argmax, lse_rest: (N,), or (0,) if not asked for."""
    check_operands("cross_entropy_forward", call.operands)
    logits = call.operands.logits
    dtype, rows = accumulation_dtype(logits.dtype), logits.shape[0]
    return (
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty(rows if call.logit_sum else 0, dtype=dtype),
        logits.new_empty(rows if call.argmax else 0, dtype=torch.int64),
        logits.new_empty(rows, dtype=dtype),
    )


@takes(LogitsBackward)
def backward_outputs(call: LogitsBackward) -> Tensor:
    """grad_logits (N, V), contiguous."""
    op, logits = "cross_entropy_backward", call.operands.logits
    check_operands(op, call.operands)
    check_per_row(op, logits, "logits", **call.cotangents._asdict(), lse=call.lse, lse_rest=call.lse_rest)
    return logits.new_empty(logits.shape)


@takes(LogitsWithGrad)
def with_grad_outputs(call: LogitsWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """loss (), losses (N,), grad_logits (N, V), contiguous, argmax (N,) or (0,)."""
    loss, losses, argmax = row_outputs("cross_entropy_with_grad", call)
    return loss, losses, call.operands.logits.new_empty(call.operands.logits.shape), argmax


@takes(LogitsWithGradInPlace)
def with_grad_in_place_outputs(call: LogitsWithGradInPlace) -> tuple[Tensor, Tensor, Tensor]:
    """loss (), losses (N,), argmax (N,) or (0,)."""
    return row_outputs("cross_entropy_with_grad_", call)


def row_outputs(op: str, call: LogitsWithGrad) -> tuple[Tensor, Tensor, Tensor]:
    check_operands(op, call.operands)
    logits = call.operands.logits
    check_denominator(op, call.reduction)
    check_per_row(op, logits, "logits", row_scale=call.reduction.row_scale)
    dtype, rows = accumulation_dtype(logits.dtype), logits.shape[0]
    return (
        logits.new_empty((), dtype=dtype),
        logits.new_empty(rows, dtype=dtype),
        logits.new_empty(rows if call.argmax else 0, dtype=torch.int64),
    )
