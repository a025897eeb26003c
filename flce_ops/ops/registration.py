"""Registers the inner operators: their schemas, and one kernel for each dispatch key.

    flce::linear_cross_entropy_forward           (target_logit, lse, ...) per token
    flce::linear_cross_entropy_backward          gradients from the cotangents of these numbers
    flce::linear_cross_entropy_backward_         adds the gradient of linear_weight to a buffer
    flce::linear_cross_entropy_with_grad         the scalar loss and its gradients, in one pass over the logits; of
                                                 functions of one token, and if ranks share the vocabulary, too
    flce::linear_kl_div_{forward, backward, with_grad}    likewise, for divergences
    flce::cross_entropy_{forward, backward, with_grad}    likewise, for given logits
    flce::cross_entropy_with_grad_               writes the gradient over the logits
    flce::linear_cross_entropy_upstream{,_}      multiplies gradients in a traced backward: made_in_forward.py

All have the same layout of dispatch keys:

    AutocastCPU, AutocastCUDA          cast the operands: autocast.py
    FuncTorchDynamicLayerFrontMode     torch.func: function.py
    Autograd                           function.py; the Functions: autograd.py, ..._autograd.py, made_in_forward.py
    CompositeExplicitAutograd          every device: the table of paths, paths.py
    fake / Meta                        flce_ops/meta

flce_ops/entry registers the entry operators.
"""

from collections.abc import Callable
from typing import Any

import torch

from .. import meta
from .._ops import add_op_namespace_prefix, ops
from ..meta.arguments import Backward, Forward
from ..meta.call import Arguments, takes
from ..support.compile_cache import add_to_key
from . import autograd, cross_entropy_autograd, kl_div_autograd, paths, with_grad_autograd
from .autocast import autocast_kernel
from .call_facts import facts_of
from .function import OperatorFunction
from .made_in_forward import MULTIPLY, multiply, multiply_in_place
from .paths import saved_notes

library = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "DEF")

FUNCTIONS: tuple[type[OperatorFunction], ...] = (
    autograd.ForwardFunction,
    autograd.BackwardFunction,
    autograd.BackwardInPlaceFunction,
    with_grad_autograd.WithGradFunction,
    kl_div_autograd.ForwardFunction,
    kl_div_autograd.BackwardFunction,
    kl_div_autograd.WithGradFunction,
    cross_entropy_autograd.ForwardFunction,
    cross_entropy_autograd.BackwardFunction,
    cross_entropy_autograd.WithGradFunction,
    cross_entropy_autograd.WithGradInPlaceFunction,
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
