"""CUDA kernel of linear_cross_entropy_backward: with lse known, the logit gradient leaves the GEMM's epilogue finished.

    G_ij = (l_i exp(z_ij - lse_i) + s_i w_j + a_i [j = y_i]) dz/du      l, s, a: cotangents of lse, logit_sum, z_y

Only the target's entry, where the terms cancel, is computed apart, in float32 from the target's own logit.
"""

import math

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.reference import target_columns
from flce_ops.triton.chunks import contiguous, padded_columns, row_chunks
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.logits_gemm import launch_logits_gemm
from flce_ops.triton.reference_logit import launch_reference_logit

# N tokens, n rows of a chunk, D hidden, V vocabulary

LOG2E = math.log2(math.e)


def launch_backward(
    grad_target_logit: Tensor | None,
    grad_lse: Tensor | None,
    grad_logit_sum: Tensor | None,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_start: int = 0,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, lse)
    grads = meta.backward_outputs(grad_target_logit, grad_lse, grad_logit_sum, *operands, output_mask=output_mask)
    grad_input, grad_weight, grad_bias = grads
    want_input, want_weight, want_bias = output_mask
    num_classes = linear_weight.shape[0]
    target, linear_bias, weight = contiguous(target, linear_bias, weight)
    columns = padded_columns(num_classes, input.dtype.itemsize)
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    step, chunks = row_chunks(
        "linear_cross_entropy_backward", input, linear_weight, columns * input.dtype.itemsize, gradient=True
    )
    with torch.cuda.device_of(input):
        target_logit2, _ = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=vocab_start, **logits
        )
        valid, hit, column = target_columns(target, ignore_index, vocab_start, num_classes)
        class_weight = weight.float() if weight is not None and grad_logit_sum is not None else None
        lse2 = (lse * LOG2E).contiguous()
        row_factor = torch.zeros_like(lse) if grad_lse is None else torch.where(valid, grad_lse, 0.0)
        sum_factor = None if grad_logit_sum is None else torch.where(valid, grad_logit_sum, 0.0)

        at_target = row_factor * torch.exp2(target_logit2 - lse2)
        if grad_target_logit is not None:
            at_target += torch.where(hit, grad_target_logit, 0.0)
        if sum_factor is not None:
            at_target += sum_factor if class_weight is None else sum_factor * class_weight[column.squeeze(1)]
        if softcap is not None:
            at_target *= 1.0 - (target_logit2 / (LOG2E * softcap)).square()
        at_target = (at_target * logit_scale).to(input.dtype)

        row_factor, sum_factor = contiguous(
            row_factor * logit_scale, None if sum_factor is None else sum_factor * logit_scale
        )
        gradient = torch.empty(step, columns, dtype=input.dtype, device=input.device)
        bias_sum = torch.zeros(num_classes, dtype=torch.float32, device=input.device) if want_bias else None
        for rows in chunks:
            chunk = gradient[: rows.stop - rows.start, :num_classes]
            launch_logits_gemm(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                epilogue="gradient",
                reference=lse2[rows],
                row_factor=row_factor[rows],
                sum_factor=None if sum_factor is None else sum_factor[rows],
                out=chunk,
                **logits,
            )
            # rows without a target here point at column 0, whose entry this is as well
            chunk.scatter_(1, column[rows], at_target[rows, None])
            if want_bias:
                bias_sum += weighted_column_sum(chunk, None)
            if want_input:
                torch.mm(chunk, linear_weight, out=grad_input[rows])
            if want_weight:
                accumulate_mm(grad_weight, chunk.T, input[rows], first=rows.start == 0)
        if want_bias:
            grad_bias.copy_(bias_sum)
    return grads


def accumulate_mm(out: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """out = a @ b for the first chunk, out += a @ b for the others."""
    if first:
        torch.mm(a, b, out=out)
    else:
        out.addmm_(a, b)
