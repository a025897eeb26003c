"""The gradient GEMMs, by cuBLAS: half operands, and float32 results where a sum goes on."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flce_ops.triton.target import interpreted

# N tokens, D hidden, V vocabulary


class Gradients(NamedTuple):
    """None where not asked for."""

    input: Tensor | None  # (N, D), written
    linear_weight: Tensor | None  # (V, D), written, or added to
    bias_sum: Tensor | None  # (V,) float32, added to


def wanted_gradients(grads: Sequence[Tensor], output_mask: list[bool]) -> Gradients:
    """Of grad_input, grad_linear_weight and grad_linear_bias. The bias is summed apart from its result."""
    grad_input, grad_weight, grad_bias = (grad if wanted else None for grad, wanted in zip(grads, output_mask))
    bias_sum = None if grad_bias is None else torch.zeros_like(grad_bias, dtype=torch.float32)
    return Gradients(grad_input, grad_weight, bias_sum)


def accumulate(out: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """out = a @ b for the first piece of a sum, out += a @ b for the others; out is half like a and b, or float32."""
    if out.dtype == a.dtype:
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
    elif interpreted(a):  # a CPU has no mixed GEMM
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.copy_(product if first else out + product)
    elif first:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
