"""The inner operators: registers their schemas, one kernel for each dispatch key, and their FLOP formulas.

    flce::linear_cross_entropy_forward           (target_logit, lse, ...) per token
    flce::linear_cross_entropy_backward          gradients from the cotangents of these numbers
    flce::linear_cross_entropy_backward_         adds the gradient of linear_weight to a buffer
    flce::linear_cross_entropy_with_grad         the scalar loss and its gradients, in one pass over the logits; of
                                                 functions of one token, and if ranks share the vocabulary, too
    flce::linear_kl_div_{forward, backward, with_grad}    likewise, for divergences
    flce::cross_entropy_with_grad_               of given logits: writes the gradient over the logits
    flce::linear_cross_entropy_upstream{,_}      multiplies gradients in a traced backward: made_in_forward.py

Given logits are an input without linear_weight. All but the last have the same layout of dispatch keys:

    AutocastCPU, AutocastCUDA          cast the operands as autocast casts those of F.linear
    FuncTorchDynamicLayerFrontMode     torch.func: function.py
    Autograd                           function.py; the Functions: autograd.py, made_in_forward.py
    CompositeExplicitAutograd          every device: the table of paths, paths.py
    fake / Meta                        flce_ops/meta

flce_ops/entry registers the entry operators. The other files of this folder:

paths.py                tables that say which kernel runs and why; the facts of a call that they read
function.py             the base class of every operator's derivative
autograd.py             derivatives of the forward and the backward operators
made_in_forward.py      the derivative of a scalar loss whose gradients forward makes
second_derivatives.py   the derivative of a backward operator: the dense formula in ATen
saved_logits.py         for how many tokens forward saves logits, and who frees them
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import meta
from .._ops import add_op_namespace_prefix, ops
from ..math.options import TEACHER
from ..meta.arguments import Backward, Forward
from ..meta.call import Arguments, takes
from ..meta.checks import is_dense
from ..support.compile_cache import add_to_key
from . import autograd, made_in_forward, paths
from .function import OperatorFunction
from .made_in_forward import MULTIPLY, multiply, multiply_in_place
from .paths import facts_of
from .saved_logits import saved_notes

CAST = {"input", "linear_weight", "linear_bias", *TEACHER[:3]}  # by autocast


has_autocast = functools.cache(torch.amp.is_autocast_available)


def autocast_operands(device_type: str, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts the operands as autocast does for F.linear: floating tensors, but not float64 ones, to autocast's dtype."""
    if not (has_autocast(device_type) and torch.is_autocast_enabled(device_type)):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and is_dense(tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        else tensor
        for tensor in operands
    )


def cast_operands(call: Any, device_type: str) -> None:
    """Casts the operands of an entry operator's call in place."""
    operands = {name: value for name, value in vars(call).items() if name in CAST}
    vars(call).update(zip(operands, autocast_operands(device_type, *operands.values())))


def autocast_kernel(arguments: type[Arguments], device_type: str) -> Callable:
    """An autocast kernel: casts the operands, and switches autocast off for the products inside.

    Backward operators and operators of given logits cast nothing: backward gets the operands that forward used, and
    given logits keep the caller's dtype.
    """
    casts = [index for name, index in arguments.index.items() if name in CAST]
    if "_backward" in arguments.op:
        casts = []

    def run(*args, **kwargs):
        values = arguments.bind(*args, **kwargs).values()
        own = casts if values[arguments.index["linear_weight"]] is not None else []
        for index, operand in zip(own, autocast_operands(device_type, *(values[index] for index in own))):
            values[index] = operand
        on = torch.is_autocast_enabled(device_type)  # an operator may be called on this key with autocast off
        torch.set_autocast_enabled(device_type, False)  # torch.autocast would take 10 us
        try:
            return arguments.dispatched(values)
        finally:
            torch.set_autocast_enabled(device_type, on)

    return run


library = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "DEF")

FUNCTIONS: tuple[type[OperatorFunction], ...] = (
    autograd.ForwardFunction,
    autograd.BackwardFunction,
    autograd.BackwardInPlaceFunction,
    made_in_forward.WithGradFunction,
    autograd.KlDivForwardFunction,
    autograd.KlDivBackwardFunction,
    made_in_forward.KlDivWithGradFunction,
    made_in_forward.WithGradInPlaceFunction,
)
OPERATORS = {function.arguments.op: function for function in FUNCTIONS}

library.define(f"{MULTIPLY}(Tensor[] made, Tensor factor, Tensor leaf) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
library.define(f"{MULTIPLY}_(Tensor(a!)[] made, Tensor factor) -> ()", tags=torch.Tag.pt2_compliant_tag)


def kernel(arguments: type[Arguments]) -> Callable:
    """An operator's kernel: runs the path that the table chooses."""

    def run(*args, **kwargs):
        call = arguments.bind(*args, **kwargs)
        call.choice = choice = paths.choice_of(arguments.op, facts_of(call))
        if isinstance(call, Forward | Backward):
            call.notes = saved_notes(choice, call)
        return paths.function(choice.path.kernel)(call)

    return run


def fake_kernel(arguments: type[Arguments]) -> Callable:
    @takes(arguments)
    def run(call: Any) -> meta.Outputs:
        add_to_key()
        return meta.outputs(call)

    return run


def autograd_kernel(function: type[OperatorFunction]) -> Callable:
    return lambda *args, **kwargs: function.run(function.arguments.bind(*args, **kwargs).values())


for _name, _function in OPERATORS.items():
    _arguments = _function.arguments
    library.define(f"{_name}{_arguments.schema()} -> {_arguments.results_schema()}", tags=torch.Tag.pt2_compliant_tag)
    _arguments.operator, _arguments.applied = getattr(ops, _name).default, _function.run
    library.impl(_name, kernel(_arguments), "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix(_name), fake_kernel(_arguments), lib=library)
    for _key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(_name, autograd_kernel(_function), _key)
    for _device_type in ("cpu", "cuda"):
        library.impl(_name, autocast_kernel(_arguments, _device_type), f"Autocast{_device_type.upper()}")

library.impl(MULTIPLY, multiply, "CompositeExplicitAutograd")
library.impl(f"{MULTIPLY}_", multiply_in_place, "CompositeExplicitAutograd")
torch.library.register_fake(add_op_namespace_prefix(MULTIPLY), multiply, lib=library)
torch.library.register_fake(add_op_namespace_prefix(f"{MULTIPLY}_"), lambda made, factor: None, lib=library)
for _name in (MULTIPLY, f"{MULTIPLY}_"):
    # called only while gradients are off: in backward, and in the traced graph of a backward
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


# N tokens, D hidden, V vocabulary; arguments are shapes instead of tensors


def product(input: Sequence[int], linear_weight: Sequence[int]) -> int:
    return 2 * input[0] * input[1] * linear_weight[0]


def flops(call: Any) -> int:
    operands = call.operands
    if operands.linear_weight is None:  # given logits
        return 0
    logits = product(operands.input, operands.linear_weight)
    found = logits * (1 + sum(getattr(call, "output_mask", ())[:2]))
    if getattr(call, "retained", None) is not None:  # saved logits cost nothing
        found -= product((call.retained[0], operands.input[1]), operands.linear_weight)
    if getattr(operands, "teacher_input", None) is not None:  # a teacher that is a model, not probabilities
        found += product(operands.teacher_input, operands.teacher_weight)
    return found


def flop_formula(arguments: type[Arguments]) -> Callable[..., int]:
    return lambda *shapes, out_shape=None, **options: flops(arguments.bind(*shapes, **options))


for _name, _function in OPERATORS.items():
    register_flop_formula(getattr(ops, _name))(flop_formula(_function.arguments))
