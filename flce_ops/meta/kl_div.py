"""Checks and uninitialised results of the operators of linear_kl_div: fake kernels, called by the real ones first."""

from torch import Tensor

from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.arguments import KlDivBackward, KlDivForward, KlDivWithGrad
from flce_ops.meta.call import takes
from flce_ops.meta.checks import check_per_row
from flce_ops.meta.kl_div_checks import check_operands
from flce_ops.meta.outputs import Gradients, gradient_outputs

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def row_statistics(operands: KlDivOperands, options: KlDivOptions) -> tuple[Tensor, Tensor, Tensor]:
    """shift (2, N), teacher_shift (2, N) or (2, 0) with teacher_probs, student_kl (N,) or (0,) for "forward".

    A shift is what makes logits log-probabilities: the row's maximum over this rank's columns, then the log of the
    softmax's denominator relative to it. Their sum, the lse, would cost the digits of one float32 at large logits.
    """
    input, dtype = operands.input, accumulation_dtype(operands.input.dtype)
    rows = input.shape[0]
    return (
        input.new_empty(2, rows, dtype=dtype),
        input.new_empty(2, rows if operands.teacher_probs is None else 0, dtype=dtype),
        input.new_empty(rows if options.of_student else 0, dtype=dtype),
    )


@takes(KlDivForward)
def forward_outputs(call: KlDivForward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """divergence (N,), then row_statistics."""
    check_operands("linear_kl_div_forward", call.operands, call.options)
    input = call.operands.input
    divergence = input.new_empty(input.shape[0], dtype=accumulation_dtype(input.dtype))
    return divergence, *row_statistics(call.operands, call.options)


@takes(KlDivWithGrad)
def with_grad_outputs(call: KlDivWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss (), divergence (N,), grad_input (N, D), grad_linear_weight (V, D), grad_linear_bias (V,)."""
    check_operands("linear_kl_div_with_grad", call.operands, call.options)
    input = call.operands.input
    check_per_row("linear_kl_div_with_grad", input, row_scale=call.row_scale)
    dtype = accumulation_dtype(input.dtype)
    loss, divergence = input.new_empty((), dtype=dtype), input.new_empty(input.shape[0], dtype=dtype)
    return loss, divergence, *gradient_outputs(call.operands, call.output_mask)


@takes(KlDivBackward)
def backward_outputs(call: KlDivBackward) -> Gradients:
    op, input = "linear_kl_div_backward", call.operands.input
    check_operands(op, call.operands, call.options)
    student_kl = call.student_kl if call.options.of_student else None
    check_per_row(op, input, grad=call.grad, student_kl=student_kl)
    shifts = {"shift": call.shift}
    if call.operands.teacher_probs is None:
        shifts["teacher_shift"] = call.teacher_shift
    for name, tensor in shifts.items():
        if tensor.shape != (2, input.shape[0]):
            raise ValueError(f"{op}: expected {name} of shape (2, {input.shape[0]}), got {tuple(tensor.shape)}")
    return gradient_outputs(call.operands, call.output_mask)
