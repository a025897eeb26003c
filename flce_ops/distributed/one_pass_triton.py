"""CUDA kernel of linear_cross_entropy_vocab_parallel_with_grad: an exchange between the GEMMs of each chunk.

    E = exp(z - reference) of this rank's classes, row sums             Triton GEMM    triton/exponentials.py
    two numbers a row, four with argmax                                 all_gather
    losses, row factors c, the target's entry of E                      one kernel     triton/finish_shard_rows.py
    grad_linear_weight += E.T @ (c input),  grad_input = c (E @ linear_weight)         as in triton/with_grad.py

Chunks are as large as the workspace allows, so there are few exchanges.
"""

import torch
from torch import Tensor

from flce_ops.distributed.one_pass import NAME, Exchange, outputs, shard_rows
from flce_ops.distributed.vocab_parallel import argmax_of_shards
from flce_ops.math_options import LossOptions
from flce_ops.path import Path, record_path
from flce_ops.target_range import check_target_range
from flce_ops.triton.chunks import padded, product_bytes, rows_and_sum, slices, small_bytes
from flce_ops.triton.columns import weighted_column_sum
from flce_ops.triton.exponentials import launch_exponentials
from flce_ops.triton.finish_rows import Rows, finished_rows
from flce_ops.triton.finish_shard_rows import launch_finish_shard_rows, launch_shard_numbers
from flce_ops.triton.gemm import accumulate
from flce_ops.triton.grad_input import float32_memory, write_grad_input
from flce_ops.triton.reference_logit import launch_reference_logit
from flce_ops.triton.scale_rows import launch_scale_rows
from flce_ops.triton.set_entries import launch_set_entries
from flce_ops.triton.split_product import SPLIT_AT_MOST, add_split_product

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


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
    z_loss: Tensor | None = None,  # ()
    softcap: Tensor | None = None,  # ()
    logit_scale: Tensor | None = None,  # ()
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
    classes = linear_weight.shape[0]
    logits = {"softcap": softcap, "logit_scale": logit_scale}
    shard = shard_rows(vocab_size, ranks)
    fitting, exact = rows_and_sum(tokens, shard, hidden, input.dtype.itemsize, want_weight=want_weight, argmax=argmax)
    chunks = slices(tokens, fitting)
    step = chunks[0].stop
    record_path(Path(NAME, "triton", f"{input.dtype} on {input.device.type}", step, len(chunks)))
    with torch.cuda.device_of(input):
        own_logit, own_dz_du, own_column = launch_reference_logit(
            input, linear_weight, target, linear_bias, ignore_index=ignore_index, vocab_start=vocab_start, **logits
        )
        exchange = Exchange(target, weight, group, ranks, vocab_size, label_smoothing, z_loss, torch.float32)
        exponentials = torch.empty(step, padded(classes, input.dtype.itemsize), dtype=input.dtype, device=input.device)
        # c * input waits in the rows of grad_input, which are written after its last use
        scaled_input = grad_input if want_input else input.new_empty(step, hidden)
        weight_sum = torch.empty_like(grad_weight, dtype=torch.float32) if exact else grad_weight
        bias_sum = torch.zeros(classes, dtype=torch.float32, device=input.device) if want_bias else None
        for rows in chunks:
            count = rows.stop - rows.start
            chunk = exponentials[:count, :classes]
            reference = own_logit[rows].clone()
            row_sums = launch_exponentials(
                input[rows],
                linear_weight,
                linear_bias,
                None,
                reference=reference,
                pieces=[(slice(0, classes), chunk)],
                logit_sum=False,
                argmax=argmax,
                **logits,
            )
            numbers = torch.empty(2 + 2 * argmax, count, dtype=torch.float32, device=input.device)
            own = Rows(
                row_sum=row_sums.exponentials,
                reference_logit=reference,
                target_logit=own_logit[rows],
                target_dz_du=None if own_dz_du is None else own_dz_du[rows],
                logit_sum=None,
                column=own_column[rows],
                target=target[rows],
                target_weight=None if exchange.target_weight is None else exchange.target_weight[rows],
                row_scale=row_scale[rows],
            )
            launch_shard_numbers(own, numbers)
            if argmax:
                numbers[2], numbers[3] = row_sums.max_logit, row_sums.argmax + vocab_start
            gathered = exchange.gather(numbers)
            if argmax:
                largest[rows] = argmax_of_shards(gathered[:, 2], gathered[:, 3])
            finished = finished_rows(losses[rows], input.dtype)
            _, entry, row_factor, weight_factor, residual = finished
            launch_finish_shard_rows(
                gathered,
                own,
                finished,
                None,
                vocab_size,
                LossOptions(label_smoothing, z_loss),
                logit_scale=logit_scale,
                ignore_index=ignore_index,
            )
            launch_set_entries(chunk, own_column[rows], entry)

            if want_bias:
                bias_sum += weighted_column_sum(chunk, weight_factor)
            if want_weight:
                first = rows.start == 0
                if tokens <= SPLIT_AT_MOST:
                    add_split_product(weight_sum, chunk, input[rows], weight_factor, first=first)
                else:
                    scaled = scaled_input[rows if want_input else slice(count)]
                    launch_scale_rows(input[rows], weight_factor, scaled)
                    accumulate(weight_sum, chunk.T, scaled, first=first)
            if want_input:
                write_grad_input(
                    grad_input[rows],
                    [(slice(0, classes), chunk)],
                    linear_weight,
                    own_column[rows],
                    row_factor,
                    residual,
                    nbytes=product_bytes(fitting, step, shard, input.dtype.itemsize),
                    memory=float32_memory(grad_input[rows.stop :]),
                    copies=small_bytes(),
                )
        if exact:
            grad_weight.copy_(weight_sum)
        if want_bias:
            grad_bias.copy_(bias_sum)
        torch.sum(row_scale * losses, dim=0, out=loss)
    return results
