"""Logits, their softmax, the numbers of their rows and their gradient in plain ATen, for chunks of rows.

    u = input @ linear_weight.T + linear_bias            (N, V), of which one chunk of rows exists at a time: chunks.py
    z = softcap * tanh(logit_scale * u / softcap)        (without softcap: logit_scale * u)
    lse_i = log sum_j exp z_ij      target_logit_i = z_i,y_i      logit_sum_i = sum_j w_j (z_ij - lse_i)
    p = exp(z - lse)                expected_log_prob_i = hbar_i = sum_j p_ij (z_ij - lse_i)

In logit_sum_i, lse_i counts as a constant. With l, a, m, h the cotangents of lse, target_logit, logit_sum and
expected_log_prob, and f' = dz/du = logit_scale / cosh^2(logit_scale * u / softcap):

    G_ij = ((l_i + h_i (z_ij - lse_i - hbar_i)) p_ij + m_i w_j + a_i [j = y_i]) f'_ij
    grad_input = G @ linear_weight      grad_linear_weight = G.T @ input      grad_linear_bias = G.T @ 1

z, p and G are in the accumulation dtype (float32 for 16-bit operands). G is rounded to the operands' dtype once, for
the two GEMMs.

Functions on a block of logits work in place. The kernels apply them to rows of a chunk. Ranks may have shards of the
classes that the numbers of a row reduce over.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..math.options import Cotangents, LogitOptions, Statistics, changed, in_columns
from ..meta.arguments import Backward

# N tokens, n rows of a chunk or of a block of one, D hidden, V vocabulary, v classes of this rank


def activate(
    product: Tensor,  # u, (n, V), overwritten if it has the accumulation dtype
    options: LogitOptions,
) -> Tensor:  # (n, V) in the accumulation dtype
    softcap, logit_scale = options
    logits = product if product.dtype.itemsize >= 4 else product.float()
    if logit_scale is not None:
        logits.mul_(logit_scale)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def activate_with_slope(
    product: Tensor,  # u, (n, V), overwritten if it has the accumulation dtype
    options: LogitOptions,
) -> tuple[Tensor, Tensor | None]:
    """`activate`'s z, (n, V), and dz/du: (n, V) with a softcap; otherwise one number, (), or None for 1."""
    softcap, logit_scale = options
    logits = product if product.dtype.itemsize >= 4 else product.float()
    if logit_scale is not None:
        logits.mul_(logit_scale)
    if softcap is None:
        return logits, logit_scale
    # 1 - tanh^2 would cancel: in float32 it is off by 1 % at logits of 6 caps, and has no correct digit at 9
    logits.div_(softcap)
    slope = logits.cosh().reciprocal_().square_()
    return logits.tanh_().mul_(softcap), slope if logit_scale is None else slope.mul_(logit_scale)


def upcast(per_class: Tensor | None, dtype: torch.dtype) -> Tensor | None:  # (V,)
    """Converts once, instead of in every block."""
    return None if per_class is None else per_class.to(dtype)


class SoftmaxFactors(NamedTuple):
    """The factors of E in G: (factor + expected (z - reference)) exp(z - reference); (n,) each, None for 0."""

    reference: Tensor
    factor: Tensor | None  # (l - h (hbar + log_sum)) / Z
    expected: Tensor | None  # h / Z

    def of(self, rows: slice | Tensor) -> "SoftmaxFactors":
        return changed(self, lambda factor: factor[rows])


def softmax_factors(call: Backward, valid: Tensor, grad_lse: Tensor | None) -> SoftmaxFactors:
    """The factors of a call. `grad_lse` comes from Cotangents.masked.

    The reference of ignored rows becomes inf: with 0, exp(z - reference) could be inf, and inf times 0 is nan.
    """
    (reference, log_sum), factor, expected = call.lse_pair.unbind(-1), grad_lse, None
    if call.grad_expected_log_prob is not None:
        expected = torch.where(valid, call.grad_expected_log_prob, 0.0).to(log_sum.dtype)
        factor = (0.0 if factor is None else factor) - expected * (call.expected_log_prob + log_sum)
    share = torch.exp(-log_sum)
    factor, expected = (None if number is None else number * share for number in (factor, expected))
    return SoftmaxFactors(torch.where(valid, reference, torch.inf), factor, expected)


def softmax_gradient(logits: Tensor, factors: SoftmaxFactors) -> Tensor:  # (n, V), in place
    reference, factor, expected = (None if number is None else number[:, None] for number in factors)
    if factor is None:
        return logits.zero_()
    if expected is None:
        return logits.sub_(reference).exp_().mul_(factor)
    shifted = at_least_finite(logits.sub_(reference))
    exponentials = shifted.exp()
    return shifted.mul_(expected).add_(factor).mul_(exponentials)


def add_target_and_sum(
    grad_logits: Tensor,  # (n, V), in place
    column: Tensor,  # (n, 1) or (n, K)
    cotangents: Cotangents,  # those of these rows
    weight: Tensor | None,  # (V,)
) -> None:
    """Adds m_i w_j, and a_i at the targets."""
    grad_logit_sum = cotangents.grad_logit_sum
    if grad_logit_sum is not None and weight is None:
        grad_logits += grad_logit_sum[:, None]
    elif grad_logit_sum is not None:
        grad_logits.addcmul_(grad_logit_sum[:, None], weight.to(grad_logits.dtype))  # addr_ would make an (n, V) copy
    if cotangents.grad_target_logit is not None:
        grad_logits.scatter_add_(1, column, in_columns(cotangents.grad_target_logit))


def sum_from_lse(sum_from_maximum: Tensor, log_sum: Tensor, weight_sum: Tensor | int) -> Tensor:
    """sum_j w_j (z_ij - lse_i), from sum_j w_j (z_ij - row_max_i) and lse_i - row_max_i, (n,) each.

    If a bias of -inf switches off all classes of a shard, the sum is -inf, not nan.
    """
    return sum_from_maximum - weight_sum * torch.where(log_sum == -torch.inf, 0.0, log_sum)


def finite_maximum(logits: Tensor) -> Tensor:  # (n, 1)
    """The row maximum, or the lowest finite number if a shard has no class or a bias of -inf on all classes.
    Exponentials are then 0, not nan.
    """
    lowest = torch.finfo(logits.dtype).min
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0], 1), lowest)
    return logits.amax(1, keepdim=True).clamp_min_(lowest)


def shift_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Subtracts row_max in place. Returns row_max and the log sum exp of the rest, (n,) each."""
    row_max = finite_maximum(logits)
    return row_max.squeeze(1), logits.sub_(row_max).exp().sum(1).log_()


def at_least_finite(log_p: Tensor) -> Tensor:
    """Clamps in place. If a bias of -inf switches a class off, p log p becomes 0, not 0 * -inf; exp(-10^4) is 0 in
    every dtype.
    """
    return log_p.clamp_(min=-1e4)


class BlockNumbers(NamedTuple):
    """(n,) each; None if not asked for."""

    row_max: Tensor
    row_sum: Tensor  # of E = exp(z - row_max)
    log_sum: Tensor  # its logarithm: lse - row_max
    logit_sum: Tensor | None  # sum_j w_j (z_j - lse)
    max_logit: Tensor | None
    argmax: Tensor | None
    expected_log_prob: Tensor | None  # sum_j p_j (z_j - lse)
    log_sum_sq_probs: Tensor | None
    mean_logit: Tensor | None

    @property
    def lse_pair(self) -> Tensor:  # (n, 2)
        return torch.stack([self.row_max, self.log_sum], -1)


def reduce_rows(
    logits: Tensor,  # (n, v), overwritten with E
    asked: Statistics,
    num_classes: int,  # V
    weight: Tensor | None = None,  # (v,)
    weight_sum: Tensor | int | None = None,  # sum_j w_j; None if no logit sum is asked for
) -> BlockNumbers:
    max_logit, argmax = logits.max(1) if asked.argmax else (None, None)
    mean_logit = logits.sum(1) / num_classes if asked.mean_logit else None
    row_max = finite_maximum(logits)
    logits.sub_(row_max)
    logit_sum = shifted = expected = squares = None
    if weight_sum is not None:
        logit_sum = logits.sum(1) if weight is None else logits @ weight.to(logits.dtype)
    if asked.entropy:
        shifted = at_least_finite(logits).clone()
    row_sum = logits.exp_().sum(1)
    row_max, log_sum = row_max.squeeze(1), row_sum.log()
    if shifted is not None:
        expected = shifted.mul_(logits).sum(1) / row_sum - log_sum
    if logit_sum is not None:
        logit_sum = sum_from_lse(logit_sum, log_sum, weight_sum)
    if asked.log_sum_sq_probs:  # the largest E of a row is 1, so neither sum underflows or overflows
        squares = logits.square().sum(1).log_() - 2.0 * log_sum
    return BlockNumbers(row_max, row_sum, log_sum, logit_sum, max_logit, argmax, expected, squares, mean_logit)
