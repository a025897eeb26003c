"""The loss of given logits in plain ATen, one block of rows at a time, in the accumulation dtype.

    z = softcap tanh(logit_scale u / softcap) of the given u          G = (l p + m w + a [j = y]) dz/du

as in flce_ops/aten/logits.py, without its GEMMs. `cross_entropy_forward` computes the numbers of a row, `..._backward`
G from their cotangents, `..._with_grad` the scalar loss and G. `..._with_grad_` writes G over the logits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import meta
from ..math.options import Statistics, TokenStatistics, accumulation_dtype
from ..math.shards import target_columns
from ..math.statistics import two_sum
from ..meta.arguments import LogitsBackward, LogitsForward, LogitsWithGrad, LogitsWithGradInPlace
from ..meta.call import takes
from .chunks import block_bytes, row_chunks, rows_of
from .gradients import Accumulator
from .logits import (
    SoftmaxFactors,
    activate,
    activate_with_slope,
    add_target_and_sum,
    apply_slope,
    softmax_gradient,
    upcast,
)
from .row_statistics import reduce_rows
from .valid_tokens import check_target_range, kernel_of, on_valid_tokens, zero_where_ignored
from .with_grad import loss_and_gradients, rows_of_call

# N tokens, n rows of a block, V vocabulary

Call = LogitsForward | LogitsBackward | LogitsWithGrad


def copied_rows(call: Call) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of each block, and a copy of their u, (n, V)."""
    logits = call.operands.logits
    dtype = accumulation_dtype(logits.dtype)
    step = max(block_bytes(logits) // (logits.shape[1] * dtype.itemsize), 1)
    for rows in row_chunks(call, logits, min(step, max(logits.shape[0], 1))):
        yield rows, rows_of(logits, rows).to(dtype, copy=True)


@kernel_of(LogitsForward, checks_target=True)
def forward(call: LogitsForward, outputs: Sequence[Tensor]) -> None:
    target_logit, lse, sums, argmax, lse_rest = outputs
    logits, target, weight = call.operands
    column = zero_where_ignored(logits, target).long().unsqueeze(1)
    weight = upcast(weight, lse.dtype)
    weight_sum = (logits.shape[1] if weight is None else weight.sum()) if call.logit_sum else None
    asked = Statistics(argmax=call.argmax)
    for rows, u in copied_rows(call):
        z = activate(u, call.logits)
        target_logit[rows] = z.gather(1, column[rows]).squeeze(1)
        found = reduce_rows(z, asked, logits.shape[1], weight, weight_sum)
        if call.argmax:
            argmax[rows] = found.argmax
        if call.logit_sum:
            sums[rows] = found.logit_sum
        lse[rows], lse_rest[rows] = two_sum(found.row_max, found.log_sum)


@kernel_of(LogitsBackward)
def backward(call: LogitsBackward, outputs: Sequence[Tensor]) -> None:
    (grad_logits,) = outputs
    logits, target, weight = call.operands
    dtype = call.lse.dtype
    valid, hit, column = target_columns(target, call.ignore_index, 0, logits.shape[1])
    cotangents = call.cotangents.masked(hit, valid, dtype)
    factor = None if cotangents.grad_lse is None else cotangents.grad_lse * torch.exp(-call.lse_rest)
    factors = SoftmaxFactors(torch.where(valid, call.lse, torch.inf), factor, None)
    weight = upcast(weight, dtype)
    for rows, u in copied_rows(call):
        z, slope = activate_with_slope(u, call.logits)
        grad = softmax_gradient(z, factors.of(rows))
        add_target_and_sum(grad, column[rows], cotangents.of(rows), weight)
        grad_logits[rows] = apply_slope(grad, slope)


@takes(LogitsWithGrad)
def with_grad(call: LogitsWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, losses, grad_logits, argmax = outputs = meta.outputs(call)
    fill_in(call, loss, losses, grad_logits, argmax)
    return outputs


@takes(LogitsWithGradInPlace)
def with_grad_in_place(call: LogitsWithGradInPlace) -> tuple[Tensor, Tensor, Tensor]:
    loss, losses, argmax = outputs = meta.outputs(call)
    fill_in(call, loss, losses, call.operands.logits, argmax)
    return outputs


def fill_in(call: LogitsWithGrad, loss: Tensor, losses: Tensor, grad_logits: Tensor, argmax: Tensor) -> None:
    """`grad_logits` may be the logits. The row of the k-th valid token is written at place k, which is never after the
    token's own place. So no row is overwritten before it is read.
    """
    call.all_count = check_target_range(call.operands.target, call.operands.logits.shape[1], call.ignore_index)
    on_valid_tokens(with_grad_of_rows, call, (losses, grad_logits, argmax), LogitsWithGrad.fills[1:])
    loss.copy_(call.reduction.loss(losses, call.operands.target != call.ignore_index))


def with_grad_of_rows(call: LogitsWithGrad, outputs: Sequence[Tensor]) -> None:
    losses, grad_logits, argmax = outputs
    statistics = TokenStatistics(argmax=argmax if call.argmax else None)
    of_tokens = rows_of_call(call, losses, statistics)
    loss_and_gradients(call, of_tokens, copied_rows(call), GivenRows(grad_logits))


class GivenRows(Accumulator):
    """Writes G to the rows of grad_logits."""

    def __init__(self, grad_logits: Tensor) -> None:
        self.grad_logits = grad_logits

    def add_products(self, rows: slice, grad_logits: Tensor) -> None:
        self.grad_logits[rows] = grad_logits
