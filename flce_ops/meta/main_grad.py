"""Checks main_grad, the buffer to which the gradient of linear_weight is added: a GEMM must be able to add to it."""

from torch import SymInt, Tensor

from ..math.options import Operands
from ..math.precision import accumulation_dtype
from .checks import check_dense

# D hidden, V vocabulary


def check_main_grad(op: str, operands: Operands, main_grad: Tensor | None) -> None:
    if main_grad is None:
        return
    linear_weight = operands.linear_weight
    check_dense(op, main_grad=main_grad)
    if main_grad.shape != linear_weight.shape or not main_grad.is_contiguous():
        raise ValueError(
            f"{op}: expected main_grad contiguous and of linear_weight's shape {tuple(linear_weight.shape)}, got shape "
            f"{tuple(main_grad.shape)} with strides {main_grad.stride()}"
        )
    dtype, accumulate = linear_weight.dtype, accumulation_dtype(linear_weight.dtype)
    if main_grad.dtype not in (dtype, accumulate):
        either = "" if dtype == accumulate else f" or linear_weight's dtype {dtype}"
        raise TypeError(f"{op}: expected main_grad in {accumulate}{either}, got {main_grad.dtype}")
    if main_grad.device != linear_weight.device:
        raise ValueError(
            f"{op}: expected main_grad on linear_weight's device {linear_weight.device}, got {main_grad.device}"
        )
    for name in ("input", "linear_weight", "linear_bias"):
        operand = getattr(operands, name)
        if operand is not None and overlap(main_grad, operand):
            raise ValueError(f"{op}: expected main_grad in memory of its own, got memory that {name} shares")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory ranges of two tensors overlap. Works for fake tensors, too."""
    if not one.numel() or not other.numel() or one.untyped_storage() is not other.untyped_storage():
        return False
    (first, stop), (other_first, other_stop) = extent(one), extent(other)
    return first < other_stop and other_first < stop


def extent(tensor: Tensor) -> tuple[int | SymInt, int | SymInt]:
    """The first byte in its storage, and one past the last."""
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.storage_offset() * tensor.itemsize, (last + 1) * tensor.itemsize
