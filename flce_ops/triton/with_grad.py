"""CUDA kernel of linear_cross_entropy_with_grad: loss and gradients in one pass over the logits, three GEMMs.

For each chunk of n rows:

    E = exp(z - reference), row sums s              Triton GEMM, the exponentials rounded once     exponentials.py
    losses, row factors c, E[i, y_i]                one small kernel                               finish_rows.py
    grad_linear_weight += E.T @ (c input)           cuBLAS
    grad_input[rows]    = c (E @ linear_weight)     cuBLAS into float32, then one rounding

The logit gradient is G = c E by rows: c goes to the (n, D) operands, and E is written once and read by GEMMs only.
"""

import torch
import triton
from torch import Tensor

from flce_ops import meta
from flce_ops.target_range import check_target_range
from flce_ops.triton.backward import accumulate_mm
from flce_ops.triton.chunks import contiguous, padded_columns, row_chunks
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.exponentials import launch_exponentials
from flce_ops.triton.finish_rows import launch_finish_rows
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.smoothing import SmoothingTerms
from flce_ops.triton.tiles import tiles_for

# N tokens, n rows of a chunk, D hidden, V vocabulary, T tiles along the vocabulary


def launch_with_grad(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    row_scale: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, row_scale)
    loss, losses, grad_input, grad_weight, grad_bias = meta.with_grad_outputs(*operands, output_mask=output_mask)
    num_classes, hidden = linear_weight.shape
    check_target_range(target, num_classes, ignore_index)
    target, linear_bias, weight, row_scale = contiguous(target, linear_bias, weight, row_scale)
    want_input, want_weight, want_bias = output_mask
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    step, chunks = row_chunks(
        "linear_cross_entropy_with_grad",
        input,
        linear_weight,
        temporary_bytes_per_row(input, linear_weight, output_mask, bool(label_smoothing)),
        gradient=True,
    )
    with torch.cuda.device_of(input):
        target_logit, _ = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=0, **logits
        )
        class_weight = None if weight is None else weight.float()
        weight_sum = None if weight is None else class_weight.sum()
        smoothing = None
        if label_smoothing:
            valid_scale = torch.where(target != ignore_index, row_scale, 0.0)
            kappa = label_smoothing * logit_scale / num_classes
            smoothing = SmoothingTerms(input, linear_weight, class_weight, valid_scale, kappa)

        columns = padded_columns(num_classes, input.dtype.itemsize)
        exponentials = torch.empty(step, columns, dtype=input.dtype, device=input.device)
        row_factor = torch.empty(step, dtype=torch.float32, device=input.device)
        # c * input waits in the rows of grad_input, which are written after its last use
        scaled_input = grad_input if want_input else torch.empty_like(input[:step])
        bias_sum = torch.zeros(num_classes, dtype=torch.float32, device=input.device) if want_bias else None

        for rows in chunks:
            count = rows.stop - rows.start
            chunk, factor = exponentials[:count, :num_classes], row_factor[:count]
            reference = target_logit[rows].clone()
            row_sum, logit_sum = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                reference=reference,
                out=chunk,
                logit_sum=bool(label_smoothing),
                **logits,
            )
            launch_finish_rows(
                row_sum=row_sum,
                reference=reference,
                target_logit=target_logit[rows],
                target=target[rows],
                row_scale=row_scale[rows],
                class_weight=class_weight,
                weight_sum=weight_sum,
                logit_sum=logit_sum,
                out=chunk,
                losses=losses[rows],
                row_factor=factor,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                **logits,
            )
            if want_bias:
                bias_sum += weighted_column_sum(chunk, factor)
            if want_weight:
                scaled = scaled_input[rows if want_input else slice(count)]
                torch.mul(input[rows], factor[:, None], out=scaled)
                accumulate_mm(grad_weight, chunk.T, scaled, first=rows.start == 0)
            if want_input:
                product = mm_float32(chunk, linear_weight)
                if smoothing is None:
                    torch.mul(product, factor[:, None], out=grad_input[rows])
                else:
                    smoothing.subtract_from_input(product.mul_(factor[:, None]), rows)
                    grad_input[rows] = product

        if want_weight and smoothing is not None:
            smoothing.subtract_from_weight(grad_weight)
        if want_bias:
            if smoothing is not None:
                smoothing.subtract_from_bias(bias_sum)
            grad_bias.copy_(bias_sum)
        torch.sum(row_scale * losses, dim=0, out=loss)
    return loss, losses, grad_input, grad_weight, grad_bias


def temporary_bytes_per_row(input: Tensor, linear_weight: Tensor, output_mask: list[bool], logit_sum: bool) -> int:
    """E; partial sums and maxima per tile; float32 E @ linear_weight, or c * input where grad_input cannot hold it."""
    num_classes, hidden = linear_weight.shape
    want_input, want_weight, _ = output_mask
    size = input.dtype.itemsize
    tiles = triton.cdiv(num_classes, tiles_for(input, linear_weight).block_v)
    exponentials = padded_columns(num_classes, size) * size
    return exponentials + tiles * 4 * (2 + logit_sum) + hidden * (4 if want_input else size * want_weight)


def mm_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with cuBLAS's float32 accumulator as the result."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
