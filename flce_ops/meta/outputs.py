"""What every inner operator does first, in its fake kernel and in its real kernels: it checks the arguments and
allocates the results.

A check belongs to a group of arguments or to an argument's name. It runs for each operator that has such arguments.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..math.options import accumulation_dtype
from .call import Result
from .shapes import check_shapes

# N tokens, K classes of a target, D hidden, V vocabulary

Outputs = tuple[Tensor, ...]  # the results of a call, in the order of its class
# of input (N, D), linear_weight (V, D), linear_bias (V,) and logit_scale (); (0,) if not wanted
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


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
            # grad_linear_bias has this shape even without a linear_bias
            like, size = (first, operands[1].shape[0]) if of is None else (of, of.shape)
            dtype = like.dtype
        if asked is not None and not asked(call):
            size = 0
        elif shape is not None:
            size = shape(call)
        found.append(like.new_empty(size, dtype=dtype or accumulate))
    return tuple(found)
