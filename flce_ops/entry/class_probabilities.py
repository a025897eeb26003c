"""The loss of targets that are class probabilities, as F.cross_entropy takes them, without the (N, V) logits.

    p_ij   = w_j [(1 - eps) q_ij + eps / V]                        q: target, (N, V); w: weight; eps: label_smoothing
    loss_i = sum_j p_ij (lse_i - z_ij)
           = sum_j p_ij (log p_ij - log softmax(z)_ij)  -  sum_j p_ij log p_ij

The first sum is what linear_kl_div's operators compute for any p >= 0, its gradient too; the second is a constant. The
sums of p need not be 1. The mean divides by all tokens: ignore_index and the class weights are not in its denominator.
"""

import torch
from torch import Tensor

from flce_ops.distributed.one_rank import OneRank
from flce_ops.entry.arguments import check_arguments
from flce_ops.entry.kl_div import flatten_tokens, row_divergences, weigh_tokens, weighted_loss
from flce_ops.entry.schemas import CrossEntropy
from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import quotient, row_factor, weighted_sum
from flce_ops.math.scalars import logit_options, scalar
from flce_ops.ops.autocast import autocast_head
from flce_ops.support.workspace import matrix_bytes

# N tokens, D hidden, V vocabulary


def loss_of_probabilities(call: CrossEntropy) -> Tensor:  # () or (...)
    layout = OneRank()
    autocast_head(call)
    check_arguments(call)
    input = call.input
    student = (input, call.linear_weight, call.linear_bias)
    operands = flatten_tokens(layout, KlDivOperands(*student, None, None, None, smoothed_and_weighted(call), None))
    options = KlDivOptions(**logit_options(call.numbers, input)._asdict())
    denominator = denominator_of(call, operands.input.shape[0])
    operands, token_weight = weigh_tokens(operands, layout.per_token(call.token_weight), denominator)
    constant = sums_of_xlogx(operands.teacher_probs, accumulation_dtype(input.dtype))
    factor = row_factor(operands.valid, token_weight, denominator)
    if call.reduction == "none":
        return layout.result(row_divergences(operands, options, factor) - factor * constant)
    loss, total = weighted_loss(operands, options, token_weight, denominator)
    loss = loss - (factor * constant).sum()
    return quotient(loss, total - weighted_sum(operands.valid, token_weight, constant), denominator)


def smoothed_and_weighted(call: CrossEntropy) -> Tensor:  # (..., V), p
    """target itself where it is p; else one more matrix of its size, in its dtype unless the weights' is wider."""
    p, eps = call.target.detach(), call.numbers.label_smoothing
    if eps != 0.0:
        p = p.mul(1.0 - eps).add_(eps / p.shape[-1])
    return p if call.weight is None else p * call.weight.detach()


def denominator_of(call: CrossEntropy, tokens: int) -> Tensor | None:  # ()
    if call.normalizer is not None:
        return call.normalizer.to(accumulation_dtype(call.input.dtype))
    return scalar(1.0, call.input) * tokens if call.reduction == "mean" else None


def sums_of_xlogx(p: Tensor, dtype: torch.dtype) -> Tensor:  # (N, V) -> (N,)
    """A block of rows at a time in eager mode, where x log x is a matrix; a compiled graph fuses it into the sum."""
    tokens, num_classes = p.shape
    if torch.compiler.is_compiling():
        return xlogx(p.to(dtype)).sum(1)
    rows = max(1, matrix_bytes(tokens) // (2 * dtype.itemsize * num_classes))  # a copy in dtype, x log x
    return torch.cat([xlogx(block.to(dtype)).sum(1) for block in p.split(rows)])


def xlogx(p: Tensor) -> Tensor:
    return torch.special.xlogy(p, p)
