"""The arguments, checks and results of the operators.

Each operator has its arguments and results as a class. The schema, the fake kernel and the checks of every real kernel
follow from this class. So shapes, dtypes and errors cannot differ between eager, compiled and meta tensors. Inside the
package, this folder imports only math, objectives and support.

arguments.py, call.py            each operator's arguments and results as a class; how a class becomes schema and call,
                                 and how each kind of result is allocated
checks.py                        checks that entry operators share: operands, a buffer for a gradient, a sparse gradient

This file is what every inner operator does first, in its fake kernel and in its real kernels: it checks the shapes and
devices that kernels rely on, by an argument's name, and allocates the results. The entry operators have checked what
the user passed. A caller of an inner operator, such as a sharded head, comes without these checks, and a kernel must
not read beyond a tensor.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..math.options import Cotangents, accumulation_dtype
from .call import Arguments, Result

# N tokens, K classes of a target, D and E hidden, V vocabulary

Outputs = tuple[Tensor, ...]  # the results of a call, in the order of its class
# of input (N, D), linear_weight (V, D), linear_bias (V,) and logit_scale (); (0,) if not wanted
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]

AXES = {  # aten/chunks.py finds the tensors with rows of tokens by it, too
    **{"input": "ND", "linear_weight": "VD", "linear_bias": "V", "weight": "V", "target": "N"},
    **{"teacher_input": "NE", "teacher_weight": "VE", "teacher_bias": "V", "teacher_probs": "NV", "valid": "N"},
    **dict.fromkeys(("expected_log_prob", "grad_expected_log_prob", "row_scale", "grad", "divergence"), "N"),
    **dict.fromkeys((*Cotangents._fields, "target_weight"), "N"),
    "main_grad": "VD",
    "lse_pair": "N2",
}
BY_CLASS = ("target", "target_weight", "grad_target_logit")  # (N, K) if a head's target names K classes of a token


def outputs(call: Any) -> Any:
    """Checks the call's shapes. Returns its uninitialised results: a tuple, or the only one."""
    check_shapes(call)
    results = allocate(call.results, call)
    return results if len(results) > 1 else results[0]


def allocate(results: Sequence[Result], call: Any) -> tuple[Tensor, ...]:
    """Allocates results, uninitialised."""
    operands, found = call.operands, []
    first = operands[0]
    tokens, accumulate = first.shape[0], accumulation_dtype(first.dtype)
    for _, shape, asked, _, dtype, operand in results:
        like, size = first, tokens
        if operand in operands._fields:
            of = getattr(operands, operand)
            # grad_linear_bias has this shape even without a linear_bias; without a head it is (0,)
            of_none = 0 if operands[1] is None else operands[1].shape[0]
            like, size = (first, of_none) if of is None else (of, of.shape)
            dtype = like.dtype
        if asked is not None and not (call.output_mask[asked] if isinstance(asked, int) else asked(call)):
            size = 0
        elif shape is not None:
            size = shape(call) if shape else ()
        found.append(like.new_empty(size, dtype=dtype or accumulate))
    return tuple(found)


@functools.cache
def checked(arguments: type[Arguments]) -> list[tuple[int, str, str, int]]:  # place, name, axes, most dimensions
    """The tensors of an operator that are checked. Its operands come first, so that others are compared with them."""
    names = [name for name, place in arguments.index.items() if name in AXES and place in arguments.tensor_places]
    names.sort(key=lambda name: not arguments.arguments[arguments.index[name]].path.startswith("operands."))
    more = BY_CLASS if "input" in names else ()
    return [(arguments.index[name], name, AXES[name], len(AXES[name]) + (name in more)) for name in names]


def check_shapes(call: Any) -> None:
    values, device = call.values(), call.operands[0].device
    sizes = {"2": 2}
    if call.operands.linear_weight is None:  # given logits
        sizes["V"] = call.operands.input.shape[-1]
        if call.operands.linear_bias is not None or call.sparse.gradient_threshold:
            raise ValueError(f"{call.op}: expected neither linear_bias nor gradient_threshold without linear_weight")
    for place, name, axes, most in checked(call.__class__):
        tensor = values[place]
        if tensor is None or (name == "weight" and vars(call).get("group") is not None):  # of all ranks
            continue
        shape = tensor.shape
        fits = len(axes) <= len(shape) <= most
        for axis, size in zip(axes, shape):
            fits &= sizes.setdefault(axis, size) == size
        if not fits:
            known = ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)
            raise ValueError(f"{call.op}: expected {name} of shape ({', '.join(axes)}), {known}, got {tuple(shape)}")
        if tensor.device != device:
            raise ValueError(f"{call.op}: expected {name} on {device}, got {tensor.device}")
    for place, tensor in enumerate(vars(call).get("tensors") or ()):
        if tensor.device != device or (tensor.dim() and tensor.shape[0] != sizes["N"]):
            raise ValueError(
                f"{call.op}: expected tensors[{place}] on {device} with {sizes['N']} rows or as a 0-d tensor, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
