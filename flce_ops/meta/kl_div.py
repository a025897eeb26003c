"""Checks and uninitialised results of each operator: its fake kernel, called by the real kernels before any work."""

from torch import Tensor

from flce_ops.math.kl_div_arguments import Operands, Options
from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.kl_div_checks import check_operands
from flce_ops.meta.outputs import gradient_outputs

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def row_statistics(operands: Operands, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """shift (2, N), teacher_shift (2, N) or (2, 0) with teacher_probs, student_kl (N,) or (0,) for "forward".

    A shift is what makes logits log-probabilities: the row's maximum over this rank's columns, then the log of the
    softmax's denominator relative to it. Their sum, the lse, would cost the digits of one float32 at large logits.
    """
    input, dtype = operands.input, accumulation_dtype(operands.input.dtype)
    rows = input.shape[0]
    return (
        input.new_empty(2, rows, dtype=dtype),
        input.new_empty(2, rows if operands.teacher_probs is None else 0, dtype=dtype),
        input.new_empty(0 if options.kind == "forward" else rows, dtype=dtype),
    )


def forward_outputs(*tensors: Tensor | None, **options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """divergence (N,), then row_statistics."""
    operands, options = Operands(*tensors), Options(**options)
    check_operands("linear_kl_div_forward", operands, options)
    divergence = operands.input.new_empty(operands.input.shape[0], dtype=accumulation_dtype(operands.input.dtype))
    return divergence, *row_statistics(operands, options)


def with_grad_outputs(*tensors: Tensor | None, output_mask: list[bool], **options) -> tuple[Tensor, ...]:
    """loss (), divergence (N,), grad_input (N, D), grad_linear_weight (V, D), grad_linear_bias (V,)."""
    *tensors, row_scale = tensors
    operands, options = Operands(*tensors), Options(**options)
    check_operands("linear_kl_div_with_grad", operands, options)
    input = operands.input
    check_per_row("linear_kl_div_with_grad", input, row_scale=row_scale)
    dtype = accumulation_dtype(input.dtype)
    return (
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        *gradient_outputs(input, operands.linear_weight, operands.linear_bias, output_mask),
    )


def backward_outputs(
    grad: Tensor, *tensors: Tensor | None, output_mask: list[bool], **options
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_input (N, D), grad_linear_weight (V, D), grad_linear_bias (V,); (0,) where `output_mask` is False."""
    *tensors, shift, teacher_shift, student_kl = tensors
    operands, options = Operands(*tensors), Options(**options)
    check_operands("linear_kl_div_backward", operands, options)
    student_kls = {} if options.kind == "forward" else {"student_kl": student_kl}
    check_per_row("linear_kl_div_backward", operands.input, grad=grad, **student_kls)
    shifts = (
        {"shift": shift} if operands.teacher_probs is not None else {"shift": shift, "teacher_shift": teacher_shift}
    )
    for name, tensor in shifts.items():
        if tensor.shape != (2, operands.input.shape[0]):
            raise ValueError(
                f"linear_kl_div_backward: expected {name} of shape (2, {operands.input.shape[0]}), "
                f"got {tuple(tensor.shape)}"
            )
    return gradient_outputs(operands.input, operands.linear_weight, operands.linear_bias, output_mask)


def check_per_row(op: str, input: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.shape[0] != input.shape[0]:
            raise ValueError(f"{op}: expected {name} of shape ({input.shape[0]},), got {tuple(tensor.shape)}")
