"""CUDA kernel of linear_cross_entropy_vocab_parallel_with_grad: an exchange between the GEMMs of each chunk.

E is taken against this rank's own reference r (base 2), so that with the lse of whole rows

    G = c E'      c = scale d_lse logit_scale 2^-(lse2 - r)      E'_iy = (E_iy - f / d_lse 2^(lse2 - r)) slope_y

where this rank holds the target, E' = E elsewhere; what rounding takes from E'_iy goes into grad_input by itself.
c goes to the (n, D) operands of the two gradient GEMMs, as in flce_ops/triton/with_grad.py. Chunks are as large as the
workspace allows, so there are few exchanges.
"""

import math

import torch
from torch import Tensor

from flce_ops.distributed.one_pass import NAME, Exchange, outputs, shard_rows
from flce_ops.path import Path, record_path
from flce_ops.reference import target_columns
from flce_ops.target_range import check_target_range
from flce_ops.triton.chunks import padded, product_bytes, rows_that_fit, slices, small_bytes
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.exponentials import launch_exponentials
from flce_ops.triton.gemm import accumulate
from flce_ops.triton.grad_input import float32_memory, write_grad_input
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.scale_rows import launch_scale_rows
from flce_ops.triton.set_entries import launch_set_entries
from flce_ops.workspace import float32_sum_fits

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary

LN2 = math.log(2.0)
# lse2 - r beyond this: this rank's classes have probabilities below 2^-30, and 2^-90 leaves c * input normal numbers.
LARGEST_EXPONENT = 90.0


def launch_vocab_parallel_with_grad(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (v, D)
    target: Tensor,  # (N,)
    linear_bias: Tensor | None,  # (v,)
    weight: Tensor | None,  # (V,)
    row_scale: Tensor,  # (N,)
    *,
    group: str,
    ranks: int,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    output_mask: list[bool],
    argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert not label_smoothing, "its gradient is not of the form c E': the ATen kernel takes it"
    operands = (input, linear_weight, target, linear_bias, weight, row_scale)
    results = outputs(*operands, output_mask=output_mask, argmax=argmax)
    loss, losses, grad_input, grad_weight, grad_bias, largest = results
    check_target_range(target, vocab_size, ignore_index)
    target, row_scale = target.contiguous(), row_scale.contiguous()
    linear_bias = None if linear_bias is None else linear_bias.contiguous()
    want_input, want_weight, want_bias = output_mask
    tokens, hidden = input.shape
    own = linear_weight.shape[0]
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    shard = shard_rows(vocab_size, ranks)
    summed = shard * hidden
    exact = want_weight and input.dtype.itemsize < 4 and float32_sum_fits(summed)
    reserved = 4 * summed * exact + small_bytes() * argmax
    fitting = rows_that_fit(tokens, shard, input.dtype.itemsize, reserved)
    chunks = slices(tokens, fitting)
    step = chunks[0].stop
    record_path(Path(NAME, "triton", f"{input.dtype} on {input.device.type}", step, len(chunks)))
    with torch.cuda.device_of(input):
        own_logit, _ = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=vocab_start, **logits
        )
        valid, hit, column = target_columns(target, ignore_index, vocab_start, own)
        own_target_column = torch.where(hit, column.squeeze(1), -1)
        scale = torch.where(valid, row_scale, 0.0).float()
        exchange = Exchange(target, weight, group, ranks, vocab_size, label_smoothing, z_loss, torch.float32)
        exponentials = torch.empty(step, padded(own, input.dtype.itemsize), dtype=input.dtype, device=input.device)
        # c * input waits in the rows of grad_input, which are written after its last use
        scaled_input = grad_input if want_input else torch.empty_like(input[:step])
        # a sum over one chunk is rounded once anyway
        several = exact and step < tokens
        weight_sum = torch.empty_like(grad_weight, dtype=torch.float32) if several else grad_weight
        bias_sum = torch.zeros(own, dtype=torch.float32, device=input.device) if want_bias else None
        for rows in chunks:
            count = rows.stop - rows.start
            chunk = exponentials[:count, :own]
            reference = own_logit[rows].clone()
            row_sums = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                None,
                reference=reference,
                pieces=[(slice(0, own), chunk)],
                logit_sum=False,
                argmax=argmax,
                **logits,
            )
            at_target = torch.exp2(own_logit[rows] - reference)
            # the sum holds the target's exponential, which was summed from another order of the same products
            row_sum = row_sums.exponentials
            row_sum = torch.where(hit[rows], torch.maximum(row_sum, at_target), row_sum)
            own_lse = (reference + row_sum.log2()) * LN2
            own_target = torch.where(hit[rows], own_logit[rows] * LN2, 0.0)
            own_largest = (row_sums.max_logit, row_sums.argmax + vocab_start) if argmax else None
            lse, target_logit, _, column_of_largest = exchange.whole_rows([own_lse, own_target], own_largest)
            if argmax:
                largest[rows] = column_of_largest
            terms = exchange.terms(rows)
            losses[rows] = torch.where(valid[rows], terms.loss(target_logit, lse, None), 0.0)

            slope = terms.d_lse(lse) + torch.zeros_like(lse)
            # c E' must stay finite where the slope vanishes (class weight 0, or z_loss against a very negative lse)
            slope = torch.where(slope.abs() > 1e-20, slope, 1e-20)
            # 0 where a bias of -inf switches off all classes of this rank (nan if those of all ranks)
            exponent = torch.where(row_sum > 0, lse / LN2 - reference, 0.0 * lse).clamp(max=LARGEST_EXPONENT)
            entry = at_target - terms.target_factor / slope * torch.exp2(exponent)
            if softcap is not None:
                entry = entry * (1.0 - (own_logit[rows] * LN2 / softcap).square())
            rounded = entry.to(input.dtype)
            factor = scale[rows] * slope * logit_scale * torch.exp2(-exponent)
            factor = torch.where(valid[rows], factor, 0.0)
            # what rounding takes from the target's entry: flce_ops/triton/finish_rows.py
            residual = factor * (entry - rounded.float())
            corrected = hit[rows] & (rounded != 0)
            correction = torch.where(corrected, entry / torch.where(corrected, rounded.float(), 1.0), 1.0)
            weight_factor = factor * correction
            launch_set_entries(chunk, own_target_column[rows], rounded, start=0, ignore_index=-1)

            if want_bias:
                bias_sum += weighted_column_sum(chunk, weight_factor)
            if want_weight:
                scaled = scaled_input[rows if want_input else slice(count)]
                launch_scale_rows(input[rows], weight_factor, scaled)
                accumulate(weight_sum, chunk.T, scaled, first=rows.start == 0)
            if want_input:
                write_grad_input(
                    grad_input[rows],
                    [(slice(0, own), chunk)],
                    linear_weight,
                    own_target_column[rows],
                    factor,
                    residual,
                    ignore_index=-1,
                    nbytes=product_bytes(fitting, step, shard, input.dtype.itemsize),
                    memory=float32_memory(grad_input[rows.stop :]),
                )
        if several:
            grad_weight.copy_(weight_sum)
        if want_bias:
            grad_bias.copy_(bias_sum)
        torch.sum(row_scale * losses, dim=0, out=loss)
    return results
