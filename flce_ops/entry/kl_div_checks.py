"""What linear_kl_div refuses by name at its entry, before any work and without reading tensor data."""

from torch import Tensor

from flce_ops.entry.arguments import check_normalizer, check_reduction
from flce_ops.math.kl_div_arguments import KlDivOperands
from flce_ops.meta.checks import check_dense, check_device, check_linear, check_real, check_target_dtype
from flce_ops.meta.kl_div_checks import check_no_teacher_gradient, check_teacher

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

OP = "linear_kl_div"


def check_arguments(
    operands: KlDivOperands,  # of shape (..., D) still
    target: Tensor | None,  # (...)
    token_weight: Tensor | None,  # (...)
    reduction: str,
    normalizer: Tensor | None,  # ()
) -> None:
    """What only the entry knows, or must say before it reshapes."""
    check_dense(OP, **operands._asdict(), target=target, token_weight=token_weight, normalizer=normalizer)
    input = operands.input
    if input.dim() < 1:
        raise ValueError(f"{OP}: expected input of shape (..., D), got a 0-d tensor")
    check_linear(OP, input, operands.linear_weight, operands.linear_bias)
    check_teacher(OP, operands)
    check_no_teacher_gradient(OP, **operands._asdict())
    tokens = input.shape[:-1]
    if target is not None:
        check_target_dtype(OP, target)
    for name, tensor in (("target", target), ("token_weight", token_weight)):
        if tensor is not None and tensor.shape != tokens:
            raise ValueError(
                f"{OP}: expected {name} of shape {tuple(tokens)}, one entry per token of input, "
                f"got {tuple(tensor.shape)}"
            )
    check_device(OP, **operands._asdict(), target=target, token_weight=token_weight)
    check_real(OP, token_weight=token_weight)
    check_reduction(OP, reduction)
    check_normalizer(OP, normalizer, reduction, input)
