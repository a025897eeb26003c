"""Checks and uninitialised results of each operator: its fake kernel, called by the real kernels before any work."""

from torch import Tensor

from flce_ops.divergence.checks import check_operands
from flce_ops.divergence.operands import Operands, Options
from flce_ops.meta.outputs import accumulation_dtype, gradient_outputs

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def row_statistics(operands: Operands, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """lse (N,), teacher_lse (N,) or (0,) with teacher_probs, student_kl (N,) or (0,) for "forward"."""
    input, dtype = operands.input, accumulation_dtype(operands.input.dtype)
    rows = input.shape[0]
    return (
        input.new_empty(rows, dtype=dtype),
        input.new_empty(rows if operands.teacher_probs is None else 0, dtype=dtype),
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
    *tensors, lse, teacher_lse, student_kl = tensors
    operands, options = Operands(*tensors), Options(**options)
    check_operands("linear_kl_div_backward", operands, options)
    per_row = {"grad": grad, "lse": lse}
    if operands.teacher_probs is None:
        per_row["teacher_lse"] = teacher_lse
    if options.kind != "forward":
        per_row["student_kl"] = student_kl
    check_per_row("linear_kl_div_backward", operands.input, **per_row)
    return gradient_outputs(operands.input, operands.linear_weight, operands.linear_bias, output_mask)


def check_per_row(op: str, input: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.shape[0] != input.shape[0]:
            raise ValueError(f"{op}: expected {name} of shape ({input.shape[0]},), got {tuple(tensor.shape)}")
