"""The target's logit of every row, by N dot products before the GEMM: the reference of the exponentials.

And dz/du there, for the target's entry of the gradient, which is made apart from the GEMM's epilogue.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.options import LogitOptions, Operands
from flce_ops.triton.logits_gemm import base2_logits, number_at

# N tokens, D hidden, V vocabulary


@triton.jit
def reference_logit_kernel(
    input_ptr,  # (N, D)
    weight_ptr,  # (V, D)
    bias_ptr,  # (V,)
    target_ptr,  # (N,)
    logit_ptr,  # (N,) out, base 2
    dz_du_ptr,  # (N,) out, dz/du / logit_scale; written with a softcap
    column_ptr,  # (N,) out, int64: the target's among these columns, -1 elsewhere
    V,
    D,
    stride_input_n,
    stride_input_d,
    stride_weight_v,
    stride_weight_d,
    vocab_start,
    ignore_index,
    logit_options,  # LogitOptions
    BLOCK_D: tl.constexpr,
):
    """z2 of the target's column, or of column 0 where the row has no target here. One program a row.

           D                D
      ┌─────────┐      ┌─────────┐ target[i]
    i │ ███████ │  ·   │ ███████ │            the gather never copies linear_weight's rows to HBM
      └─────────┘      └─────────┘
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row).to(tl.int64)
    column = target - vocab_start
    hit = (target != ignore_index) & (column >= 0) & (column < V)
    tl.store(column_ptr + row, tl.where(hit, column, -1))
    column = tl.where(hit, column, 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        x = tl.load(input_ptr + row * stride_input_n + d * stride_input_d, mask=d < D, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + column * stride_weight_v + d * stride_weight_d, mask=d < D, other=0.0).to(tl.float32)
        acc += x * w
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column).to(tl.float32)
    logit_scale, softcap = number_at(logit_options.logit_scale), number_at(logit_options.softcap)
    z2, dz_du = base2_logits(tl.sum(acc, 0), bias, logit_options, logit_scale, softcap)
    tl.store(logit_ptr + row, z2)
    if logit_options.softcap is not None:
        tl.store(dz_du_ptr + row, dz_du)


def launch_reference_logit(
    operands: Operands,
    logit_options: LogitOptions,
    *,
    ignore_index: int,
    vocab_start: int,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The logit in base 2, with a softcap dz/du / logit_scale, and the target's column (int64, -1 if not here)."""
    input, linear_weight, target, linear_bias, _ = operands
    rows = input.shape[0]
    logit = input.new_empty(rows, dtype=torch.float32)
    dz_du = None if logit_options.softcap is None else torch.empty_like(logit)
    column = input.new_empty(rows, dtype=torch.int64)
    reference_logit_kernel[(rows,)](
        input,
        linear_weight,
        linear_bias,
        target,
        logit,
        dz_du,
        column,
        linear_weight.shape[0],
        input.shape[1],
        *input.stride(),
        *linear_weight.stride(),
        vocab_start,
        ignore_index,
        logit_options,
        BLOCK_D=min(1024, triton.next_power_of_2(input.shape[1])),
        num_warps=4,
    )
    return logit, dz_du, column
