"""Uninitialised results of each inner operator, after its checks."""

import torch
from torch import Tensor

from flce_ops.math.kl_div_arguments import KlDivOperands
from flce_ops.math.options import Operands
from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.arguments import Backward, BackwardInPlace, DoubleBackward, Forward, VocabParallelWithGrad, WithGrad
from flce_ops.meta.call import takes
from flce_ops.meta.checks import check_denominator, check_device, check_operands, check_per_row, check_per_slot
from flce_ops.meta.main_grad import check_main_grad
from flce_ops.meta.sparse_checks import check_sparse

# N tokens, K slots of a target, D hidden, V vocabulary

Gradients = tuple[Tensor, Tensor, Tensor]  # of input (N, D), linear_weight (V, D), linear_bias (V,); (0,) if not wanted

ForwardOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# loss (), losses (N,), the three gradients, and the fields of Statistics, (N,) each or (0,)
OnePassOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

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
    """target_logit, lse, logit_sum, expected_log_prob, max_logit, argmax, log_sum_sq_probs, mean_logit, lse_rest: (N,),
    or (0,) if not asked for; the first is (N, K) of such a target. And retained logits, (R, columns) int16.
    """
    check_operands("linear_cross_entropy_forward", call.operands, slots=True)
    check_main_grad("linear_cross_entropy_forward", call.operands, call.main_grad)
    input = call.operands.input
    dtype = accumulation_dtype(input.dtype)
    rows = input.shape[0]
    return (
        input.new_empty(call.operands.target.shape, dtype=dtype),
        input.new_empty(rows, dtype=dtype),
        input.new_empty(rows if call.logit_sum else 0, dtype=dtype),
        input.new_empty(rows if call.expected_log_prob else 0, dtype=dtype),
        input.new_empty(rows if call.argmax else 0, dtype=dtype),
        input.new_empty(rows if call.argmax else 0, dtype=torch.int64),
        input.new_empty(rows if call.log_sum_sq_probs else 0, dtype=dtype),
        input.new_empty(rows if call.mean_logit else 0, dtype=dtype),
        input.new_empty(rows, dtype=dtype),
        input.new_empty(
            call.retain, retained_columns(call.operands.linear_weight.shape[0], input.dtype), dtype=torch.int16
        ),
    )


@takes(Backward)
def backward_outputs(call: Backward) -> Gradients:
    check_backward("linear_cross_entropy_backward", call)
    return gradient_outputs(call.operands, call.output_mask)


@takes(BackwardInPlace)
def backward_in_place_outputs(call: BackwardInPlace) -> Gradients:
    """grad_linear_weight is (0,)."""
    op = "linear_cross_entropy_backward_"
    check_backward(op, call)
    check_main_grad(op, call.operands, call.main_grad)
    want_input, want_weight, want_bias = call.output_mask
    if call.sparse.gradient_threshold:
        raise NotImplementedError(f"{op}: gradient_threshold with main_grad is not implemented; leave one of them out")
    if not want_weight:
        raise ValueError(f"{op}: expected output_mask to want grad_linear_weight, got {call.output_mask}")
    return gradient_outputs(call.operands, [want_input, False, want_bias])


def check_backward(op: str, call: Backward) -> None:
    check_operands(op, call.operands, slots=True)
    if (call.grad_expected_log_prob is None) != (call.expected_log_prob is None):
        raise ValueError(f"{op}: expected grad_expected_log_prob and expected_log_prob together, got one of them")
    check_per_row(
        op,
        call.operands.input,
        **call.cotangents._replace(grad_target_logit=None)._asdict(),
        lse=call.lse,
        grad_expected_log_prob=call.grad_expected_log_prob,
        expected_log_prob=call.expected_log_prob,
        lse_rest=call.lse_rest,
    )
    check_per_slot(op, call.operands.target, grad_target_logit=call.cotangents.grad_target_logit)
    check_retained(op, call.operands, call.retained)
    check_sparse(op, call.sparse, call.operands.input)


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
def with_grad_outputs(call: WithGrad) -> OnePassOutputs:
    op = "linear_cross_entropy_with_grad"
    check_denominator(op, call.reduction)
    target, target_weight = call.operands.target, call.target_weight
    if (target.dim() == 2) != (target_weight is not None):
        raise ValueError(
            f"{op}: expected a target of shape (N, K) and target_weight together, got target of shape "
            f"{tuple(target.shape)} and target_weight {'None' if target_weight is None else tuple(target_weight.shape)}"
        )
    check_per_slot(op, target, target_weight=target_weight)
    check_device(op, call.operands.input, target_weight=target_weight)
    check_sparse(op, call.sparse, call.operands.input)
    return one_pass_outputs(op, call, call.operands, call.reduction.row_scale, slots=True)


@takes(VocabParallelWithGrad)
def vocab_parallel_with_grad_outputs(call: VocabParallelWithGrad) -> OnePassOutputs:
    # the class weights are those of all ranks
    op = "linear_cross_entropy_vocab_parallel_with_grad"
    check_sparse(op, call.sparse, call.operands.input)
    return one_pass_outputs(op, call, call.operands._replace(weight=None), call.row_scale)


def one_pass_outputs(
    op: str,
    call: WithGrad | VocabParallelWithGrad,
    operands: Operands,
    row_scale: Tensor | None,
    *,
    slots: bool = False,
) -> OnePassOutputs:
    check_operands(op, operands, slots=slots)
    input, asked = operands.input, call.statistics
    check_per_row(op, input, row_scale=row_scale)
    dtype = accumulation_dtype(input.dtype)
    return (
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        *gradient_outputs(operands, call.output_mask),
        input.new_empty(input.shape[0] if asked.argmax else 0, dtype=torch.int64),
        input.new_empty(input.shape[0] if asked.lse else 0, dtype=dtype),
        input.new_empty(input.shape[0] if asked.entropy else 0, dtype=dtype),
        input.new_empty(input.shape[0] if asked.log_sum_sq_probs else 0, dtype=dtype),
        input.new_empty(input.shape[0] if asked.mean_logit else 0, dtype=dtype),
    )


@takes(DoubleBackward)
def double_backward_outputs(call: DoubleBackward) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of grad_target_logit, grad_lse, grad_logit_sum (N,) each, input, linear_weight, linear_bias.

    The first is (N, K) of such a target.
    """
    op = "linear_cross_entropy_double_backward"
    check_operands(op, call.operands, slots=True)
    input, linear_weight, target, linear_bias, _ = call.operands
    likes = {"grad_grad_input": input, "grad_grad_linear_weight": linear_weight}
    for name, like in likes.items():
        tensor = getattr(call.grad_grads, name)
        if tensor is not None and tensor.shape != like.shape:
            raise ValueError(f"{op}: expected {name} of shape {tuple(like.shape)}, got {tuple(tensor.shape)}")
    dtype = accumulation_dtype(input.dtype)
    return (
        input.new_empty(target.shape, dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        *gradient_outputs(call.operands, [True, True, linear_bias is not None]),
    )


def gradient_outputs(operands: Operands | KlDivOperands, output_mask: list[bool]) -> Gradients:
    input, linear_weight = operands.input, operands.linear_weight
    want_input, want_weight, want_bias = output_mask
    return (
        input.new_empty(input.shape if want_input else (0,)),
        linear_weight.new_empty(linear_weight.shape if want_weight else (0,)),
        linear_weight.new_empty(linear_weight.shape[0] if want_bias else 0),
    )
