"""Uninitialised results of each inner operator, after its checks."""

import torch
from torch import Tensor

from flce_ops.math import kl_div_arguments as kl_div
from flce_ops.math.options import Operands
from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.arguments import Backward, DoubleBackward, Forward, VocabParallelWithGrad, WithGrad, takes
from flce_ops.meta.checks import check_operands, check_per_row
from flce_ops.meta.sparse_checks import check_sparse, check_sparse_options

# N tokens, D hidden, V vocabulary

Gradients = tuple[Tensor, Tensor, Tensor]  # of input (N, D), linear_weight (V, D), linear_bias (V,); (0,) if not wanted


ForwardOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

CLASSES_PER_MAXIMUM = 128  # a tile of the Triton kernels has at least so many


def retained_columns(num_classes: int, dtype: torch.dtype) -> int:
    """16-bit columns of a row of retained logits, which starts on 16 bytes.

    V numbers of the operands' dtype and a float32 for each tile; what is in them is the kernels' own
    (flce_ops/triton/logit_codes.py, flce_ops/aten/chunks.py).
    """
    numbers, maxima = (num_classes + 7) // 8, (num_classes + 4 * CLASSES_PER_MAXIMUM - 1) // (4 * CLASSES_PER_MAXIMUM)
    return 4 * dtype.itemsize * (numbers + maxima)


@takes(Forward)
def forward_outputs(call: Forward) -> ForwardOutputs:
    """target_logit, lse, logit_sum, expected_logit, max_logit, argmax, lse_rest: (N,), or (0,) if not asked for.

    And retained logits, (R, columns) int16.
    """
    check_operands("linear_cross_entropy_forward", call.operands)
    input = call.operands.input
    dtype = accumulation_dtype(input.dtype)
    rows = input.shape[0]
    return (
        input.new_empty(rows, dtype=dtype),
        input.new_empty(rows, dtype=dtype),
        input.new_empty(rows if call.logit_sum else 0, dtype=dtype),
        input.new_empty(rows if call.expected_logit else 0, dtype=dtype),
        input.new_empty(rows if call.argmax else 0, dtype=dtype),
        input.new_empty(rows if call.argmax else 0, dtype=torch.int64),
        input.new_empty(rows, dtype=dtype),
        input.new_empty(
            call.retain, retained_columns(call.operands.linear_weight.shape[0], input.dtype), dtype=torch.int16
        ),
    )


@takes(Backward)
def backward_outputs(call: Backward) -> Gradients:
    op = "linear_cross_entropy_backward"
    check_operands(op, call.operands)
    if (call.grad_expected_logit is None) != (call.expected_logit is None):
        raise ValueError(f"{op}: expected grad_expected_logit and expected_logit together, got one of them")
    check_per_row(
        op,
        call.operands.input,
        **call.cotangents._asdict(),
        lse=call.lse,
        grad_expected_logit=call.grad_expected_logit,
        expected_logit=call.expected_logit,
        lse_rest=call.lse_rest,
    )
    check_retained(op, call.operands, call.retained)
    return gradient_outputs(call.operands, call.output_mask)


def check_retained(op: str, operands: Operands, retained: Tensor | None) -> None:
    if retained is None:
        return
    columns = retained_columns(operands.linear_weight.shape[0], operands.input.dtype)
    if retained.dim() != 2 or retained.shape[1] != columns or retained.dtype != torch.int16:
        raise ValueError(
            f"{op}: expected retained as the forward operator gives it, (R, {columns}) in torch.int16, "
            f"got {tuple(retained.shape)} in {retained.dtype}"
        )


@takes(WithGrad)
def with_grad_outputs(call: WithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss (), losses (N,), the three gradients, argmax (N,) or (0,)."""
    op, (row_scale, denominator) = "linear_cross_entropy_with_grad", call.reduction
    if denominator is not None and (row_scale is not None or denominator.dim() != 0):
        raise ValueError(
            f"{op}: expected denominator to be a 0-d tensor, and without row_scale, which is divided already; got "
            f"shape {tuple(denominator.shape)}" + ("" if row_scale is None else " beside row_scale")
        )
    check_sparse_options(op, call.sparse)
    if call.sparse.gradient_threshold:
        check_sparse(op, call.sparse, call.operands.input, call.loss.label_smoothing, call.logits.softcap)
    return one_pass_outputs(op, call, call.operands, row_scale)


@takes(VocabParallelWithGrad)
def vocab_parallel_with_grad_outputs(
    call: VocabParallelWithGrad,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # the class weights are those of all ranks
    op = "linear_cross_entropy_vocab_parallel_with_grad"
    return one_pass_outputs(op, call, call.operands._replace(weight=None), call.row_scale)


def one_pass_outputs(
    op: str, call: WithGrad | VocabParallelWithGrad, operands: Operands, row_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_operands(op, operands)
    input = operands.input
    check_per_row(op, input, row_scale=row_scale)
    dtype = accumulation_dtype(input.dtype)
    return (
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        *gradient_outputs(operands, call.output_mask),
        input.new_empty(input.shape[0] if call.argmax else 0, dtype=torch.int64),
    )


@takes(DoubleBackward)
def double_backward_outputs(call: DoubleBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of grad_target_logit, grad_lse, grad_logit_sum (N,) each, input, linear_weight, linear_bias."""
    op = "linear_cross_entropy_double_backward"
    check_operands(op, call.operands)
    input, linear_weight, _, linear_bias, _ = call.operands
    likes = {"grad_grad_input": input, "grad_grad_linear_weight": linear_weight}
    for name, like in likes.items():
        tensor = getattr(call.grad_grads, name)
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f"{op}: expected {name} of shape {tuple(like.shape)}, got {tuple(tensor.shape)}")
    dtype = accumulation_dtype(input.dtype)
    return (
        input.new_empty(input.shape[0], dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        *gradient_outputs(call.operands, [True, True, linear_bias is not None]),
    )


def gradient_outputs(operands: Operands | kl_div.Operands, output_mask: list[bool]) -> Gradients:
    input, linear_weight = operands.input, operands.linear_weight
    want_input, want_weight, want_bias = output_mask
    return (
        input.new_empty(input.shape if want_input else (0,)),
        linear_weight.new_empty(linear_weight.shape if want_weight else (0,)),
        linear_weight.new_empty(linear_weight.shape[0] if want_bias else 0),
    )
