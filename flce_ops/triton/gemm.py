"""The gradient GEMMs, by cuBLAS: half operands, and float32 results where a sum goes on."""

import torch
from torch import Tensor


def accumulate(out: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """out = a @ b for the first piece of a sum, out += a @ b for the others; out is half like a and b, or float32."""
    if out.dtype == a.dtype:
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
    elif a.device.type == "cuda":
        if first:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        else:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:  # the interpreter's CPU has no mixed GEMM
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.copy_(product if first else out + product)
