"""The Triton kernels in place of the ATen ones for CPU tensors, in Triton's interpreter, as the table of paths has it.

float32 stands in for bfloat16, whose products the interpreter makes wrong; float16 goes where it goes on CUDA.
"""

from collections.abc import Callable

import torch

from flce_ops.ops.paths import KERNELS, choose, function, situation_of
from flce_ops.ops.registration import OPERATORS
from tests.interpreter import remember_what_is_patched

_library = torch.library.Library("flce", "IMPL")  # its kernels live as long as this does


def kernel(name: str) -> Callable:
    def run(*args, **kwargs):
        call = OPERATORS[name].arguments.bind(*args, **kwargs)
        situation = situation_of(call)._replace(device="cuda")
        if situation.dtype == torch.float32:
            situation = situation._replace(dtype=torch.bfloat16)
        return function(choose(KERNELS[name], situation).kernel)(call)

    return run


def install() -> None:
    remember_what_is_patched()
    for name in ("forward", "backward", "with_grad"):
        name = f"linear_cross_entropy_{name}"
        _library.impl(name, kernel(name), "CPU")
