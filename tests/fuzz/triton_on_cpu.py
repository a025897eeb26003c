"""Replaces the ATen kernels for CPU tensors by the Triton ones, in Triton's interpreter, as the table of paths says.

float32 stands in for bfloat16, whose products are wrong in the interpreter. float16 takes the same path as on CUDA.
Logits are saved for float16 only, because 16 bits do not have float32's digits.
"""

from collections.abc import Callable

import torch

from flce_ops.meta.arguments import Forward
from flce_ops.ops import OPERATORS, autograd, saved_logits
from flce_ops.ops.paths import choice_of, facts_of, function
from tests.interpreter import remember_what_is_patched

_library = torch.library.Library("flce", "IMPL")  # the registered kernels live as long as this object


def kernel(name: str) -> Callable:
    def run(*args, **kwargs):
        call = OPERATORS[name].arguments.bind(*args, **kwargs)
        facts = facts_of(call)._replace(device="cuda")
        if facts.dtype == torch.float32:
            facts = facts._replace(dtype=torch.bfloat16)
        if facts.teacher == torch.float32:
            facts = facts._replace(teacher=torch.bfloat16)
        return function(choice_of(name, facts).path.kernel)(call)

    return run


def saved_rows(call: Forward) -> int:
    half = call.operands.input.dtype == torch.float16
    return saved_logits.saved_rows(call) if half and call.logits.softcap is None else 0


def install() -> None:
    autograd.saved_rows = saved_rows
    remember_what_is_patched()
    for name in OPERATORS:
        _library.impl(name, kernel(name), "CPU")
