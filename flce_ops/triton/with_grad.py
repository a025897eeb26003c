"""CUDA kernel of linear_cross_entropy_with_grad: loss and gradients in one pass over the logits, three GEMMs.

For each chunk of n rows:

    E = exp(z - reference), row sums s              Triton GEMM, the exponentials rounded once     exponentials.py
    losses, row factors c, E[i, y_i]                one small kernel                               finish_rows.py
    grad_linear_weight += E.T @ (c input)           cuBLAS
    grad_input[rows]    = c (E @ linear_weight)     cuBLAS into a float32 block, one rounding      finish_product.py

The logit gradient is G = c E by rows: c goes to the (n, D) operands, and E is written once and read by GEMMs only.

grad_linear_weight is rounded, read and written once a chunk. A workspace too small for RECOMPUTE_BELOW rows is better
spent on a fourth GEMM pass (backward.py), which sums over many rows at a time.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.target_range import check_target_range
from flce_ops.triton.chunks import (
    contiguous,
    padded,
    product_blocks,
    record_triton_path,
    rows_that_fit,
    slices,
    small_bytes,
)
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.exponentials import launch_exponentials
from flce_ops.triton.finish_product import launch_finish_product
from flce_ops.triton.finish_rows import launch_finish_rows
from flce_ops.triton.gemm import accumulate
from flce_ops.triton.recompute import launch_recomputing
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.smoothing import SmoothingTerms
from flce_ops.workspace import float32_sum_fits

# N tokens, n rows of a chunk, D hidden, V vocabulary

RECOMPUTE_BELOW = 384  # H200, D = 4096: 1.78 us a row for grad_linear_weight at 512 rows, 1.60 at 2048, 3 at 256


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
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    operands = (input, linear_weight, target, linear_bias, weight, row_scale)
    num_classes, hidden = linear_weight.shape
    size = input.dtype.itemsize
    exact = output_mask[1] and size < 4 and float32_sum_fits(linear_weight.numel())
    reserved = 4 * linear_weight.numel() * exact + small_bytes() * argmax  # its two numbers a tile
    chunks = slices(input.shape[0], rows_that_fit(input.shape[0], num_classes, size, reserved))
    if len(chunks) > 1 and chunks[0].stop < RECOMPUTE_BELOW:
        return launch_recomputing(
            *operands,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            logit_scale=logit_scale,
            output_mask=output_mask,
            argmax=argmax,
        )
    record_triton_path("linear_cross_entropy_with_grad", input, linear_weight, chunks)
    outputs = meta.with_grad_outputs(*operands, output_mask=output_mask, argmax=argmax)
    loss, losses, grad_input, grad_weight, grad_bias, largest = outputs
    check_target_range(target, num_classes, ignore_index)
    target, linear_bias, weight, row_scale = contiguous(target, linear_bias, weight, row_scale)
    want_input, want_weight, want_bias = output_mask
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    step = chunks[0].stop
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
        # a sum over one chunk is rounded once anyway
        weight_gradient = (
            torch.empty_like(grad_weight, dtype=torch.float32) if exact and len(chunks) > 1 else grad_weight
        )
        if want_weight and smoothing is not None:
            smoothing.start_weight_gradient(weight_gradient)

        columns = padded(num_classes, size)
        exponentials = torch.empty(step, columns, dtype=input.dtype, device=input.device)
        factors = torch.empty(3, step, dtype=torch.float32, device=input.device)
        # c * input waits in the rows of grad_input, which are written after its last use
        scaled_input = grad_input if want_input else torch.empty_like(input[:step])
        bias_sum = torch.zeros(num_classes, dtype=torch.float32, device=input.device) if want_bias else None

        for rows in chunks:
            count = rows.stop - rows.start
            chunk = exponentials[:count, :num_classes]
            row_factor, weight_factor, residual = factors[:, :count].unbind()
            reference = target_logit[rows].clone()
            row_sums = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                class_weight,
                reference=reference,
                out=chunk,
                logit_sum=bool(label_smoothing),
                argmax=argmax,
                **logits,
            )
            if argmax:
                largest[rows] = row_sums.argmax
            launch_finish_rows(
                row_sum=row_sums.exponentials,
                reference=reference,
                target_logit=target_logit[rows],
                target=target[rows],
                row_scale=row_scale[rows],
                class_weight=class_weight,
                weight_sum=weight_sum,
                logit_sum=row_sums.logits,
                out=chunk,
                losses=losses[rows],
                row_factor=row_factor,
                weight_factor=weight_factor,
                residual=residual,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                **logits,
            )
            if want_bias:
                bias_sum += weighted_column_sum(chunk, weight_factor)
            if want_weight:
                scaled = scaled_input[rows if want_input else slice(count)]
                torch.mul(input[rows], weight_factor[:, None], out=scaled)
                accumulate(weight_gradient, chunk.T, scaled, first=rows.start == 0 and smoothing is None)
            if want_input:
                for block, cols in product_blocks(count, hidden):
                    product = torch.empty(
                        block.stop - block.start, cols.stop - cols.start, dtype=torch.float32, device=input.device
                    )
                    accumulate(product, chunk[block], linear_weight[:, cols], first=True)
                    tokens = slice(rows.start + block.start, rows.start + block.stop)
                    launch_finish_product(
                        product,
                        grad_input[tokens, cols],
                        linear_weight[:, cols],
                        target[tokens],
                        row_factor[block],
                        residual[block],
                        None if smoothing is None else smoothing.input_terms(tokens, cols),
                        ignore_index=ignore_index,
                    )
                    del product  # before the next one is allocated

        if weight_gradient is not grad_weight:
            grad_weight.copy_(weight_gradient)
        if want_bias:
            if smoothing is not None:
                smoothing.subtract_from_bias(bias_sum)
            grad_bias.copy_(bias_sum)
        torch.sum(row_scale * losses, dim=0, out=loss)
    return outputs
