"""Floating-point operations of each inner operator for torch.utils.flop_counter: GEMM passes of 2 N D V.

Elementwise work over the logits is not counted, as the counter does not count ATen's softmax. All N tokens are counted,
although kernels may skip ignored tokens: which tokens are ignored is data, and a formula sees only shapes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from .._ops import ops
from ..meta.call import Arguments
from .registration import OPERATORS

# N tokens, D hidden, V vocabulary; arguments are shapes instead of tensors


def product(input: Sequence[int], linear_weight: Sequence[int]) -> int:
    return 2 * input[0] * input[1] * linear_weight[0]


def flops(call: Any) -> int:
    operands = call.operands
    logits = product(operands.input, operands.linear_weight)
    found = logits * (1 + sum(getattr(call, "output_mask", ())[:2]))
    if getattr(call, "retained", None) is not None:  # saved logits cost nothing
        found -= product((call.retained[0], operands.input[1]), operands.linear_weight)
    if getattr(operands, "teacher_input", None) is not None:  # a teacher that is a model, not probabilities
        found += product(operands.teacher_input, operands.teacher_weight)
    return found


def formula(arguments: type[Arguments]) -> Callable[..., int]:
    return lambda *shapes, out_shape=None, **options: flops(arguments.bind(*shapes, **options))


for _name, _function in OPERATORS.items():
    if _name.startswith("linear"):  # operators of given logits run no GEMM
        register_flop_formula(getattr(ops, _name))(formula(_function.arguments))
