"""CUDA kernel of linear_cross_entropy_backward: with lse known, the logit gradient leaves the GEMM's epilogue finished.

    G_ij = ((l_i + c_i (1 + z_ij - m_i)) p_ij + s_i w_j + a_i [j = y_i]) dz/du         p_ij = exp(z_ij - lse_i)

    l, s, a, c: cotangents of lse, logit_sum, z_y and of the expected logit m_i = sum_j p_ij z_ij

Only the target's entry, where the terms cancel, is computed apart, in float32 from the target's own logit; what its
rounding takes goes into grad_input by itself (finish_product.py).

             V slice                      for each slice of the rows (one, unless the workspace is small)
           ┌────┬────┬────┐                   for each slice of the vocabulary
        N  │ G  │    │    │                       G                                   Triton
           └────┴────┴────┘                       grad_linear_weight[slice] = G.T @ input     rounded once
                                                  grad_input (float32) += G @ linear_weight[slice]

Since nothing needs a whole row of logits any more, the slices run along V: each part of grad_linear_weight comes whole,
and only the small grad_input is summed over slices.
"""

import math

import torch

from flce_ops import meta
from flce_ops.meta.arguments import Backward, takes
from flce_ops.support.readable import copied_row_bytes, copy_bytes, readable_rows
from flce_ops.support.workspace import float32_sum_fits, get_workspace, matrix_bytes
from flce_ops.triton.chunks import MULTIPLE, contiguous, padded, record_triton_path, slices
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.epilogues import Gradient
from flce_ops.triton.finish_product import launch_finish_product
from flce_ops.triton.gemm import Gradients, accumulate, wanted_gradients
from flce_ops.triton.logits_gemm import launch_logits_gemm
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.set_entries import launch_set_entries

# N tokens, n rows of a chunk, D hidden, V vocabulary

LOG2E = math.log2(math.e)
BLOCK_V = 256  # columns of a tile of the logits GEMM


@takes(Backward)
def launch_backward(call: Backward) -> meta.Gradients:
    outputs = meta.backward_outputs(call)
    gradients = wanted_gradients(outputs, call.output_mask)
    add_gradients(call, gradients, first=True)
    if gradients.bias_sum is not None:
        outputs[2].copy_(gradients.bias_sum)
    return outputs


def add_gradients(call: Backward, gradients: Gradients, *, first: bool) -> None:
    """Of the operands that `gradients` names; grad_linear_weight is written if `first`, else added to."""
    input, linear_weight, target, linear_bias, weight = call.operands
    grad_target_logit, grad_lse, grad_logit_sum = call.cotangents
    grad_expected_logit, expected_logit = call.grad_expected_logit, call.expected_logit
    lse, lse_rest, logit_options = call.lse, call.lse_rest, call.logits
    grad_input, grad_weight, bias_sum = gradients
    want_input, want_weight, want_bias = (grad is not None for grad in gradients)
    num_classes, hidden = linear_weight.shape
    target, linear_bias, weight = contiguous(target, linear_bias, weight)
    size = input.dtype.itemsize
    copies = copy_bytes(linear_weight) if want_input else 0
    row_bytes = copied_row_bytes(input) if want_weight else 0
    row_slices, column_slices = pieces(input.shape[0], hidden, num_classes, size, want_input, copies, row_bytes)
    chunk_rows, chunk_columns = row_slices[0].stop, padded(column_slices[0].stop, size)
    record_triton_path("linear_cross_entropy_backward", input, linear_weight, row_slices)
    with torch.cuda.device_of(input):
        target_logit2, target_dz_du, column = launch_reference_logit(
            call.operands._replace(target=target, linear_bias=linear_bias),
            logit_options,
            ignore_index=call.ignore_index,
            vocab_start=call.vocab_start,
        )
        valid = target != call.ignore_index
        class_weight = weight.float() if weight is not None and grad_logit_sum is not None else None
        lse64 = lse.double() if lse_rest is None else lse.double() + lse_rest
        lse2 = (lse64 * LOG2E).float()
        share = torch.exp2(lse2 - lse64 * LOG2E).float()  # of exp2(z2 - lse2): what the rounding of lse2 takes
        row_factor = torch.zeros_like(lse) if grad_lse is None else torch.where(valid, grad_lse, 0.0)
        sum_factor = None if grad_logit_sum is None else torch.where(valid, grad_logit_sum, 0.0)
        shift_factor = None
        if grad_expected_logit is not None:
            # c (1 + z - m) = c (1 + lse - m) + c (z - lse), the second in base 2
            grad_expected = torch.where(valid, grad_expected_logit, 0.0)
            row_factor = row_factor + grad_expected * (1.0 + lse - expected_logit)
            shift_factor = grad_expected / LOG2E * share
        row_factor = row_factor * share

        at_target = row_factor
        if shift_factor is not None:
            # a target that a bias of -inf switches off has p log p = 0, not 0 * -inf
            at_target = at_target + shift_factor * (target_logit2 - lse2).clamp(min=-1e4)
        at_target = at_target * torch.exp2(target_logit2 - lse2)
        if grad_target_logit is not None:
            at_target += torch.where(column >= 0, grad_target_logit, 0.0)
        if sum_factor is not None:
            at_target += sum_factor if class_weight is None else sum_factor * class_weight[column.clamp(min=0)]
        if target_dz_du is not None:
            at_target *= target_dz_du
        if logit_options.logit_scale is not None:
            at_target = at_target * logit_options.logit_scale
            row_factor, sum_factor, shift_factor = (
                None if factor is None else factor * logit_options.logit_scale
                for factor in (row_factor, sum_factor, shift_factor)
            )
        residual = at_target - at_target.to(input.dtype).float()
        one = torch.ones_like(residual)

        row_factor, sum_factor, shift_factor = contiguous(row_factor, sum_factor, shift_factor)
        gradient = torch.empty(chunk_rows * chunk_columns, dtype=input.dtype, device=input.device)
        accum_float32 = (
            first and want_weight and len(row_slices) > 1 and size < 4 and float32_sum_fits(linear_weight.numel())
        )
        grad_weight_acc = torch.empty_like(grad_weight, dtype=torch.float32) if accum_float32 else grad_weight
        for rows in row_slices:
            count = rows.stop - rows.start
            input_sum = torch.empty(count, hidden, dtype=torch.float32, device=input.device) if want_input else None
            for cols in column_slices:
                width = cols.stop - cols.start
                chunk = gradient[: count * padded(width, size)].view(count, -1)[:, :width]
                launch_logits_gemm(
                    input[rows],
                    linear_weight[cols],
                    None if linear_bias is None else linear_bias[cols],
                    Gradient(
                        lse2[rows],
                        row_factor[rows],
                        None if class_weight is None else class_weight[cols],
                        None if sum_factor is None else sum_factor[rows],
                        None if shift_factor is None else shift_factor[rows],
                    ),
                    logit_options,
                    out=chunk,
                )
                launch_set_entries(chunk, column[rows], at_target[rows], start=cols.start)
                if want_bias:
                    bias_sum[cols] += weighted_column_sum(chunk, None)
                if want_weight:
                    accumulate(grad_weight_acc[cols], chunk.T, input[rows], first=first and rows.start == 0)
                if want_input:
                    for part, classes in readable_rows(linear_weight[cols], copies):
                        first_part = cols.start == part.start == 0
                        accumulate(input_sum, chunk[:, part], classes, first=first_part)
                    del classes  # a copy, perhaps: before the next slice's is allocated
            if want_input:
                launch_finish_product(
                    input_sum,
                    grad_input[rows],
                    linear_weight,
                    column[rows],
                    one[rows],
                    residual[rows],
                    None,
                )
                del input_sum  # before the next one is allocated
        if grad_weight_acc is not grad_weight:
            grad_weight.copy_(grad_weight_acc)


def pieces(
    rows: int, hidden: int, num_classes: int, itemsize: int, want_input: bool, copies: int = 0, row_bytes: int = 0
) -> tuple[list[slice], list[slice]]:
    """Row slices that take at most half the workspace, and column slices that fill what is left beside `copies` bytes.

    A row takes grad_input's float32 sum and `row_bytes`.
    """
    row_bytes += 4 * hidden * want_input
    half = get_workspace() // 2
    most_rows = max(half // row_bytes // MULTIPLE * MULTIPLE, MULTIPLE) if row_bytes else rows
    row_slices = slices(rows, min(most_rows, rows))
    count = row_slices[0].stop
    left = matrix_bytes(rows) - row_bytes * count - copies
    most_columns = max(left // (count * itemsize) // BLOCK_V * BLOCK_V, BLOCK_V)
    return row_slices, slices(num_classes, most_columns)
