"""Checks and allocated results of linear_cross_entropy_low_rank_with_grad."""

from torch import Tensor

from flce_ops.math.precision import accumulation_dtype
from flce_ops.meta.arguments import LowRankWithGrad
from flce_ops.meta.call import takes
from flce_ops.meta.checks import (
    check_dense,
    check_device,
    check_linear,
    check_operands,
    check_per_class,
    check_per_row,
)

# N tokens, D hidden, V vocabulary, r rank of the pair


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@takes(LowRankWithGrad)
def with_grad_outputs(call: LowRankWithGrad) -> Outputs:
    """loss (), losses (N,), and the gradients of the mask, (0,) where not wanted."""
    op, operands = "linear_cross_entropy_low_rank_with_grad", call.operands
    input, linear_weight, low_rank_input, low_rank_weight, *_, class_scale = operands
    check_operands(op, operands.head)
    check_dense(op, low_rank_input=low_rank_input, low_rank_weight=low_rank_weight, class_scale=class_scale)
    for name, tensor, rows in (
        ("low_rank_input", low_rank_input, input.shape[0]),
        ("low_rank_weight", low_rank_weight, linear_weight.shape[0]),
    ):
        if tensor.dim() != 2 or tensor.shape[0] != rows:
            raise ValueError(f"{op}: expected {name} of shape ({rows}, r), got {tuple(tensor.shape)}")
        if tensor.dtype != input.dtype:
            raise TypeError(f"{op}: expected {name} in input's dtype {input.dtype}, got {tensor.dtype}")
    check_linear(op, low_rank_input, low_rank_weight, None, ("low_rank_input", "low_rank_weight", ""))
    if class_scale is not None:
        check_per_class(op, "class_scale", class_scale, linear_weight.shape[0])
    check_device(op, input, low_rank_input=low_rank_input, low_rank_weight=low_rank_weight, class_scale=class_scale)
    check_per_row(op, input, row_scale=call.reduction.row_scale)
    want_input, want_pair_input, want_pair_weight, want_bias, want_scale = call.output_mask
    if want_scale and class_scale is None:
        raise ValueError(f"{op}: output_mask asks for the gradient of class_scale, which is not given")
    dtype = accumulation_dtype(input.dtype)
    return (
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape[0], dtype=dtype),
        input.new_empty(input.shape if want_input else (0,)),
        input.new_empty(low_rank_input.shape if want_pair_input else (0,)),
        input.new_empty(low_rank_weight.shape if want_pair_weight else (0,)),
        input.new_empty(linear_weight.shape[0] if want_bias else 0),
        input.new_empty(0) if class_scale is None else class_scale.new_empty(class_scale.shape if want_scale else (0,)),
    )
