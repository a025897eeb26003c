"""CUDA kernel of linear_cross_entropy_vocab_parallel_with_grad: an exchange between the GEMMs of each chunk.

    E = exp(z - reference) of this rank's classes, row sums             Triton GEMM    triton/exponentials.py
    two numbers a row, four with argmax                                 all_gather
    losses, row factors c, the target's entry of E                      one kernel     triton/finish_shard_rows.py
    grad_linear_weight += E.T @ (c input),  grad_input = c (E @ linear_weight)         as in triton/with_grad.py

Chunks are as large as the workspace allows, so there are few exchanges.
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.math.options import Operands
from flce_ops.math.shards import Exchange, argmax_of_shards, shard_rows
from flce_ops.meta.arguments import VocabParallelWithGrad, takes
from flce_ops.support.path import Path, record_path
from flce_ops.support.target_range import check_target_range
from flce_ops.triton.chunks import contiguous, product_bytes, rows_and_sum, slices, small_bytes
from flce_ops.triton.cut import Cut
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import FinishedRows, Tokens
from flce_ops.triton.finish_shard_rows import launch_finish_shard_rows, launch_shard_numbers
from flce_ops.triton.gemm import wanted_gradients
from flce_ops.triton.one_pass_step import OnePassStep, tokens_of
from flce_ops.triton.row_loss import RowLoss

# N tokens, n rows of a chunk, D hidden, V vocabulary, v of them on this rank, R ranks that share the vocabulary


@takes(VocabParallelWithGrad)
def launch_vocab_parallel_with_grad(
    call: VocabParallelWithGrad,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert not call.loss.label_smoothing, "its gradient is not of the form c E': the ATen kernel takes it"
    outputs = meta.vocab_parallel_with_grad_outputs(call)
    loss, losses, *grads, columns = outputs
    input, linear_weight, target, linear_bias, weight = call.operands
    argmax, logit_options, ignore_index, vocab_start = call.argmax, call.logits, call.ignore_index, call.vocab_start
    check_target_range(target, call.vocab_size, ignore_index)
    target, linear_bias, row_scale = contiguous(target, linear_bias, call.row_scale)
    operands = Operands(input, linear_weight, target, linear_bias, weight)
    cut = cut_shard(input, shard_rows(call.vocab_size, call.ranks), want_weight=call.output_mask[1], argmax=argmax)
    reason = f"{input.dtype} on {input.device.type}"
    op = "linear_cross_entropy_vocab_parallel_with_grad"
    record_path(Path(op, "triton", reason, cut.chunks[0].stop, len(cut.chunks)))
    with torch.cuda.device_of(input):
        exchange = Exchange(target, weight, call.group, call.ranks, call.vocab_size, call.loss, torch.float32)
        row_loss = RowLoss(None, call.vocab_size, call.loss)

        def finish_rows(tokens: Tokens, sums: RowSums) -> tuple[FinishedRows, Tensor | None]:
            numbers = launch_shard_numbers(tokens, sums)
            if argmax:
                numbers[2], numbers[3] = sums.max_logit, sums.argmax + vocab_start
            gathered = exchange.gather(numbers)
            finished = launch_finish_shard_rows(
                gathered,
                tokens,
                sums,
                row_loss,
                input.dtype,
                logit_scale=logit_options.logit_scale,
                ignore_index=ignore_index,
            )
            return finished, argmax_of_shards(gathered[:, 2], gathered[:, 3]) if argmax else None

        where = {"ignore_index": ignore_index, "vocab_start": vocab_start}
        tokens = tokens_of(operands, logit_options, exchange.target_weight, row_scale, losses, **where)
        gradients = wanted_gradients(grads, call.output_mask)
        step = OnePassStep(operands, logit_options, tokens, gradients, columns if argmax else None, cut, finish_rows)
        step.run_chunks(cut.chunks)
        step.finish()
        if gradients.bias_sum is not None:
            grads[2].copy_(gradients.bias_sum)
        torch.sum(row_scale * losses, dim=0, out=loss)
    return outputs


def cut_shard(input: Tensor, shard: int, *, want_weight: bool, argmax: bool) -> Cut:
    """Chunks that are the same on all ranks: they follow from the largest shard's rows."""
    (count, hidden), size = input.shape, input.dtype.itemsize
    fitting, accum_float32 = rows_and_sum(count, shard, hidden, size, want_weight=want_weight, argmax=argmax)
    chunks = slices(count, fitting)
    room = product_bytes(fitting, chunks[0].stop, shard, size)
    return Cut(None, chunks, False, accum_float32, room, small_bytes())
