"""Mean logits without a softcap, where the mean over the classes goes through: no GEMM's epilogue takes part.

1/V sum_j z_ij = s/V (x_i . sum_j W_j + sum_j b_j)        one read of linear_weight, and one of input
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.options import LogitOptions, Operands
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.kept_tokens import Kept, kept_rows
from flce_ops.triton.logits_gemm import number_at
from flce_ops.triton.replay import Kernel

# N tokens, n of them here, D hidden, V vocabulary


@Kernel
@triton.jit
def mean_logits_kernel(
    kept,  # Kept
    input_ptr,  # (N, D)
    weight_sum_ptr,  # (D,) float32
    bias_sum_ptr,  # () float32; None for 0
    out_ptr,  # (N,) out, 0 where ignored
    n,
    D,
    V,
    stride_input_n,
    stride_input_d,
    logit_scale_ptr,  # ()
    BLOCK_D: tl.constexpr,
):
    """One program a token."""
    row = tl.program_id(0)
    token = tl.load(kept.order + row).to(tl.int64)
    total = number_at(bias_sum_ptr, 0.0)
    kept_d = tl.where(row < kept_rows(kept, n), D, 0)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, kept_d, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(input_ptr + token * stride_input_n + d.to(tl.int64) * stride_input_d, mask=d < D, other=0.0)
        acc += x.to(tl.float32) * tl.load(weight_sum_ptr + d, mask=d < D, other=0.0)
    mean = (tl.sum(acc, 0) + total) * number_at(logit_scale_ptr) / V
    tl.store(out_ptr + token, tl.where(kept_d > 0, mean, 0.0))


def launch_mean_logits(
    operands: Operands,
    logit_options: LogitOptions,
    kept: Kept,
    num_classes: int,  # V, of all ranks
    out: Tensor,  # (N,)
) -> None:
    input, linear_weight, _, linear_bias, _ = operands
    n, hidden = kept.order.shape[0], input.shape[1]
    mean_logits_kernel[(n,)](
        kept,
        input,
        weighted_column_sum(linear_weight, None),
        None if linear_bias is None else linear_bias.sum(dtype=torch.float32),
        out,
        n,
        hidden,
        num_classes,
        *input.stride(),
        logit_options.logit_scale,
        BLOCK_D=min(1024, triton.next_power_of_2(hidden)),
        num_warps=4,
    )
