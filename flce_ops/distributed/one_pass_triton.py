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
from flce_ops.math_options import LogitOptions, LossOptions, Operands
from flce_ops.path import Path, record_path
from flce_ops.target_range import check_target_range
from flce_ops.triton.chunks import contiguous, product_bytes, rows_and_sum, slices, small_bytes
from flce_ops.triton.cut import Cut
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.finish_shard_rows import launch_finish_shard_rows, launch_shard_numbers
from flce_ops.triton.gemm import wanted_gradients
from flce_ops.triton.one_pass_step import OnePassStep, tokens_of
from flce_ops.triton.row_loss import RowLoss

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
    results = outputs(
        input, linear_weight, target, linear_bias, weight, row_scale, output_mask=output_mask, argmax=argmax
    )
    loss, losses, *grads, columns = results
    check_target_range(target, vocab_size, ignore_index)
    target, linear_bias, row_scale = contiguous(target, linear_bias, row_scale)
    operands, logit_options = (
        Operands(input, linear_weight, target, linear_bias, weight),
        LogitOptions(softcap, logit_scale),
    )
    cut = cut_shard(input, shard_rows(vocab_size, ranks), want_weight=output_mask[1], argmax=argmax)
    record_path(Path(NAME, "triton", f"{input.dtype} on {input.device.type}", cut.chunks[0].stop, len(cut.chunks)))
    with torch.cuda.device_of(input):
        exchange = Exchange(target, weight, group, ranks, vocab_size, label_smoothing, z_loss, torch.float32)
        row_loss = RowLoss(None, vocab_size, LossOptions(label_smoothing, z_loss))

        def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
            numbers = launch_shard_numbers(tokens, sums)
            if argmax:
                numbers[2], numbers[3] = sums.max_logit, sums.argmax + vocab_start
            gathered = exchange.gather(numbers)
            options = {"logit_scale": logit_scale, "ignore_index": ignore_index}
            finished = launch_finish_shard_rows(gathered, tokens, sums, row_loss, input.dtype, **options)
            return finished, argmax_of_shards(gathered[:, 2], gathered[:, 3]) if argmax else None

        where = {"ignore_index": ignore_index, "vocab_start": vocab_start}
        tokens = tokens_of(operands, logit_options, exchange.target_weight, row_scale, losses, **where)
        gradients = wanted_gradients(grads, output_mask)
        step = OnePassStep(operands, logit_options, tokens, gradients, columns if argmax else None, cut, finish_rows)
        step.run_chunks(cut.chunks)
        step.finish()
        if gradients.bias_sum is not None:
            grads[2].copy_(gradients.bias_sum)
        torch.sum(row_scale * losses, dim=0, out=loss)
    return results


def cut_shard(input: Tensor, shard: int, *, want_weight: bool, argmax: bool) -> Cut:
    """Chunks that are the same on all ranks: they follow from the largest shard's rows."""
    (count, hidden), size = input.shape, input.dtype.itemsize
    fitting, accum_float32 = rows_and_sum(count, shard, hidden, size, want_weight=want_weight, argmax=argmax)
    chunks = slices(count, fitting)
    room = product_bytes(fitting, chunks[0].stop, shard, size)
    return Cut(None, chunks, False, accum_float32, room, small_bytes())
