"""grad_input of a block of tokens from the float32 product E @ linear_weight, rounded once.

    grad_input_i = c_i (E @ linear_weight)_i + residual_i linear_weight[column_i]  (+ u_i v, label smoothing)

residual_i is what rounding took from the target's entry of E: see flce_ops/triton/finish_rows.py.
"""

import triton
import triton.language as tl
from torch import Tensor

# n tokens of a block, D hidden, V vocabulary


@triton.jit
def finish_product_kernel(
    product_ptr,  # (n, D) float32
    out_ptr,  # (n, D)
    weight_ptr,  # (V, D)
    column_ptr,  # (n,) int64, the target's, -1 where there is none
    row_factor_ptr,  # (n,)
    residual_ptr,  # (n,)
    u_ptr,  # (n,)
    v_ptr,  # (D,)
    D,
    stride_product_n,
    stride_out_n,
    stride_weight_v,
    stride_weight_d,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < D
    column = tl.load(column_ptr + row)
    has_target = column >= 0
    column = tl.where(has_target, column, 0)
    weight = tl.load(weight_ptr + column * stride_weight_v + d.to(tl.int64) * stride_weight_d, mask=mask, other=0.0)
    grad = tl.load(product_ptr + row * stride_product_n + d, mask=mask, other=0.0) * tl.load(row_factor_ptr + row)
    grad += tl.where(has_target, tl.load(residual_ptr + row), 0.0) * weight.to(tl.float32)
    if u_ptr is not None:
        grad += tl.load(u_ptr + row) * tl.load(v_ptr + d, mask=mask, other=0.0)
    tl.store(out_ptr + row * stride_out_n + d, grad.to(out_ptr.dtype.element_ty), mask=mask)


def launch_finish_product(
    product: Tensor,  # (n, D) float32
    out: Tensor,  # (n, D)
    linear_weight: Tensor,  # (V, D)
    column: Tensor,  # (n,)
    row_factor: Tensor,  # (n,)
    residual: Tensor,  # (n,)
    outer: tuple[Tensor, Tensor] | None,  # (n,), (D,)
) -> None:
    assert product.stride(1) == out.stride(1) == 1
    rows, hidden = product.shape
    block = min(1024, triton.next_power_of_2(hidden))
    u, v = outer or (None, None)
    finish_product_kernel[(rows, triton.cdiv(hidden, block))](
        product,
        out,
        linear_weight,
        column,
        row_factor,
        residual,
        u,
        v,
        hidden,
        product.stride(0),
        out.stride(0),
        *linear_weight.stride(),
        BLOCK_D=block,
        num_warps=4,
    )
