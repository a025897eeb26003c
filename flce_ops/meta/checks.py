"""Checks of the flattened operands that the inner operators share. Errors name the argument.

Also checks of main_grad, a buffer to which a GEMM must be able to add, and of a sparse gradient's options.

Each message says which argument, what was expected, what came, and what to do if that is not obvious. Nothing here
reads tensor data. The kernels check the range of `target` (flce_ops/support/target_range.py).
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import SymBool, SymInt, Tensor

from ..math.options import Operands, accumulation_dtype
from ..math.sparse_gradient import MODES, OPERANDS, SparseGradient
from ..support.refusals import refuse_hole
from ..support.torch_private import assert_when_it_runs, has_tangent

# N tokens, D hidden, V vocabulary

DENSE_TYPES = (Tensor, torch.nn.Parameter)  # the usual types, which need no further check
SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TARGET_DTYPES = (torch.int64, torch.int32)


def holds(condition: bool | SymBool) -> bool:
    """Whether a condition on sizes holds."""
    if not isinstance(condition, SymBool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # a tracer has imported it

    if guard_or_true(condition):
        assert_when_it_runs(condition, "flce_ops: expected sizes that are equal")
        return True
    return False


def same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes, as torch.Size or tuples, are equal."""
    try:
        return one == other
    except RuntimeError:  # two unbacked sizes
        return len(one) == len(other) and all(holds(size == beside) for size, beside in zip(one, other))


OF_POLICY, OF_TEACHER = ("advantages", "old_log_probs", "ref_log_probs"), ("teacher_input", "teacher_probs")
PER_TOKEN = ("target", "target_weight", "token_weight", *OF_POLICY, *OF_TEACHER)


def assert_counts(op: str, given: dict[str, Any], rows: Tensor) -> None:  # (..., D) or (..., V)
    """Asserts numbers of tokens that only the run knows to be equal, with the argument's name. Dynamo traces this: what
    an operator asserts loses its message.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true

    for name in PER_TOKEN:
        tensor = given.get(name)
        if tensor is not None:
            for size, tokens in zip(tensor.shape, rows.shape[:-1]):
                if guard_or_true(size == tokens) and not statically_known_true(size == tokens):
                    assert_when_it_runs(size == tokens, f"{op}: expected {name} for as many tokens as the input has")


def is_dense(tensor: Tensor) -> bool:
    """Whether a kernel can read the tensor, and its shape and dtype describe its contents."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return type(tensor) in DENSE_TYPES or not (is_quantized(tensor) or is_pruned(tensor))


def is_quantized(tensor: Tensor) -> bool:
    """Whether this is a quantized tensor: one of torch's own, or of a subclass with its own dequantize()
    (torchao's, over packed integers).

    The dispatch of such subclasses knows F.linear, but none of this package's operators. Other subclasses
    (nn.Parameter, FakeTensor, DTensor, a user's) are accepted.
    """
    return tensor.is_quantized or type(tensor).dequantize is not Tensor.dequantize


def is_pruned(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.sparse.SparseSemiStructuredTensor)


def check_dense(op: str, **tensors: Tensor | None) -> None:
    """Checks that tensors are dense, before anything else is read from them."""
    for name, tensor in tensors.items():
        usual = tensor is None or (
            type(tensor) in DENSE_TYPES
            and tensor.layout == torch.strided
            and not (tensor.is_nested or tensor.is_quantized)
        )
        if usual or is_dense(tensor):
            continue
        if tensor.is_nested:
            raise TypeError(
                f"{op}: expected {name} to be a dense tensor, got a nested one; pass the tokens of all sequences in a "
                "row, input.values() and target.values() of the jagged layout, or pad them"
            )
        if is_quantized(tensor):
            # torchao's NF4Tensor has a method dequantize, but it does not return the weight
            way = "get_original_weight" if hasattr(tensor, "get_original_weight") else "dequantize"
            raise TypeError(
                f"{op}: expected {name} to be a dense tensor, got a quantized one of type {type(tensor).__name__}; "
                f"pass {name}.{way}()"
            )
        kind = type(tensor).__name__ if is_pruned(tensor) else str(tensor.layout)
        raise TypeError(f"{op}: expected {name} to be a dense tensor, got {kind}; pass {name}.to_dense()")


def check_unpacked(op: str, name: str, weight: Tensor) -> None:
    """Refuses packed integer weights. Called before the shape is checked: the shape of a packed weight is that of its
    storage.
    """
    if not weight.dtype.is_floating_point and not weight.dtype.is_complex:
        hint = swapped_with_target(name, weight) or (
            ", the storage of a quantized weight; "
            "dequantize it first, as bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)"
        )
        raise TypeError(f"{op}: expected {name} in a floating dtype, got {weight.dtype}{hint}")


def swapped_with_target(name: str, tensor: Tensor) -> str:
    """A hint at the end of an error about a dtype, if `tensor` and the target may have been swapped; otherwise ""."""
    indices = tensor.dtype in TARGET_DTYPES
    return f", which class indices have; are {name} and target swapped?" if indices else ""


def check_real(op: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype.is_complex:
            raise TypeError(f"{op}: expected {name} to be real, got {tensor.dtype}")


def refuse_dtype(op: str, name: str, tensor: Tensor) -> NoReturn:
    supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
    raise TypeError(
        f"{op}: expected {name} in one of {supported}, got {tensor.dtype}{swapped_with_target(name, tensor)}"
    )


def check_linear(
    op: str,
    input: Tensor,  # (..., D)
    weight: Tensor,  # (V, D)
    bias: Tensor | None,  # (V,)
    names: tuple[str, str, str] = ("input", "linear_weight", "linear_bias"),
    *,
    classes_at_least: int = 1,
) -> None:
    """Checks hidden states, the weight of their head, and its bias."""
    of_input, of_weight, of_bias = names
    if input.dtype not in SUPPORTED_DTYPES:
        refuse_dtype(op, of_input, input)
    if weight.dtype != input.dtype:
        check_unpacked(op, of_weight, weight)
    if weight.dim() != 2:
        hint = (
            " (a 1-D weight is what FSDP1 leaves outside the forward of the module that owns it: "
            "call the loss inside that forward)"
            if weight.dim() == 1
            else ""
        )
        raise ValueError(f"{op}: expected {of_weight} of shape (V, D), got {tuple(weight.shape)}{hint}")
    if weight.shape[1] != input.shape[-1]:
        hint = f"; pass {of_weight}.T" if weight.shape[0] == input.shape[-1] else ""
        if input.dim() > 2 and input.shape[1] == weight.shape[1]:
            hint = f"; the features come last here, not second: pass {of_input}.movedim(1, -1)"
        raise ValueError(
            f"{op}: {of_input} has {input.shape[-1]} features, but {of_weight} has shape {tuple(weight.shape)}; "
            f"expected (V, {input.shape[-1]}), as nn.Linear's weight{hint}"
        )
    if weight.shape[0] < classes_at_least:
        raise ValueError(f"{op}: expected {of_weight} with at least one class, got {tuple(weight.shape)}")
    if bias is not None:
        check_per_class(op, of_bias, bias, weight.shape[0], of_weight)
    for name, tensor in ((of_weight, weight), (of_bias, bias)):
        if tensor is not None and tensor.dtype != input.dtype:
            raise TypeError(
                f"{op}: expected {name} in {of_input}'s dtype {input.dtype}, got {tensor.dtype}; "
                "cast one of them or call it under torch.autocast"
            )


def check_target_dtype(op: str, target: Tensor) -> None:
    if target.dtype not in TARGET_DTYPES:
        hint = " (linear_cross_entropy alone takes class probabilities)" if target.is_floating_point() else ""
        raise TypeError(
            f"{op}: expected target of class indices in int64 or int32, got {target.dtype}{hint}; pass target.long()"
        )


def check_per_class(op: str, name: str, tensor: Tensor, num_classes: int, of_weight: str = "linear_weight") -> None:
    if tensor.dim() != 1 or tensor.shape[0] != num_classes:
        raise ValueError(
            f"{op}: expected {name} of shape ({num_classes},), one entry per row of {of_weight}, "
            f"got {tuple(tensor.shape)}"
        )
    check_floating(op, **{name: tensor})


def check_device(op: str, input: Tensor, of: str = "input", **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != input.device:
            raise ValueError(
                f"{op}: expected {name} on the device of {of}, {input.device}, got {tensor.device}; pass "
                f"{name}.to({of}.device), or {of}.to({name}.device)"
            )


def check_floating(op: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{op}: expected {name} in a floating dtype, got {tensor.dtype}")


def check_constants(op: str, hole: str = "constant", /, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and ((tensor.requires_grad and torch.is_grad_enabled()) or has_tangent(tensor)):
            refuse_hole(op, hole, name=name)


def check_main_grad(op: str, operands: Operands, main_grad: Tensor) -> None:
    linear_weight = operands.linear_weight
    if main_grad.requires_grad:
        raise ValueError(f"{op}: expected main_grad without requires_grad, as it is added to; pass main_grad.detach()")
    if torch.is_grad_enabled() and not linear_weight.requires_grad:
        raise ValueError(
            f"{op}: main_grad takes the gradient of linear_weight, which requires none; leave main_grad out for a "
            "frozen head"
        )
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


def check_sparse(op: str, sparse: SparseGradient, input: Tensor | None = None) -> None:
    """Checks the options; with `input`, also what making the gradient needs."""
    threshold = sparse.gradient_threshold
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"{op}: expected gradient_threshold in [0, 1), got {threshold}")
    for name, known in (("gradient_mode", MODES), ("gradient_sparse", OPERANDS)):
        value = getattr(sparse, name)
        if value not in known:
            raise ValueError(f"{op}: expected {name} to be one of {', '.join(known)}, got {value!r}")
    if input is None or not threshold:
        return
    seed = sparse.gradient_seed
    if sparse.gradient_mode == "unbiased":
        if seed is None:
            raise ValueError(
                f"{op}: gradient_mode='unbiased' expects gradient_seed, a 0-d int64 tensor on input's device that is "
                "another one in every step; got None"
            )
        if seed.dim() != 0 or seed.dtype != torch.int64:
            raise ValueError(
                f"{op}: expected gradient_seed to be a 0-d tensor in torch.int64, got {tuple(seed.shape)} in "
                f"{seed.dtype}"
            )
        check_device(op, input, gradient_seed=seed)
    if input.dtype == torch.float16:
        refuse_hole(op, "float16")
