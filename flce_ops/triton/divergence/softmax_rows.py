"""The stored logits of a model for the rows of a chunk, and the shift that turns them into log-probabilities.

    stored     u_ij = z_ij - tile_max_it          t the tile of column j; rounded to 16 bits
    log q_ij = (u_ij + (tile_max_it - shift_0i)) - shift_1i

shift_0 is the row's maximum over this rank's columns. shift_1 is the log of the softmax's denominator relative to that
maximum. Their sum in one float32 would lose digits at large logits. Logits, maxima and shifts are in base 2 (times log2
e) unless nats are named.

If G needs dz/du of a softcap, the logits before the softcap are stored instead, in nats. Computing dz/du from z would
cancel.

The denominator sums the exponentials of the rounded numbers, so the probabilities q add up to 1. If rounding moves a
logit by e_j, log q_j moves by e_j less the mean of e under q, and the divergence sum_j p_j (log p_j - log q_j) by
sum_j (q_j - p_j) e_j, which is small near the teacher. With the denominator of the exact logits it would move by
-sum_j p_j e_j: for a sure token, the rounding of its largest logit.

float16 holds u within 2^-12 of its own size, and u is 0 at the largest logit of a tile, so the entries with most of the
probability are the most exact. bfloat16 would lose eight times as much, and an exponential in float16 underflows at
2^-24 of the largest. For float16 operands u is a fixed-point number (fixed_point.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...math.options import LogitOptions
from ...math.shards import log_denominator
from ..gemm.backends import backend_for
from ..gemm.epilogues import MaxSum
from ..rows.two_sum import rescaled
from ..rows.valid_tokens import ValidTokens

# N tokens, n rows of a chunk, V vocabulary (of this rank), T tiles along it, R ranks that share it


class Softmax(NamedTuple):
    logits: Tensor  # (n, V) u
    stride: int  # between its rows, a multiple of 16
    tile_max: Tensor  # (T, n)
    shift: Tensor  # (2, n)
    softcap: Tensor | None = None  # (), if the logits are stored before it


class Linear(NamedTuple):
    """A model's head, and the gathered tokens it is applied to."""

    rows: Tensor  # (n, D) of valid tokens
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    options: LogitOptions


@triton.jit
def move_shift(
    shift_ptr,  # (2, n), read at i
    i,
    n,
    out_ptr,  # (2, N) out, written at token
    token,
    N,
    mask,
    inside,
    FACTOR: tl.constexpr,  # ln 2 or log2 e
):
    high = tl.load(shift_ptr + i, mask=mask, other=0.0)
    low = tl.load(shift_ptr + n + i, mask=mask, other=0.0)
    high, low = rescaled(high, low, FACTOR)
    tl.store(out_ptr + token, high, mask=inside)
    tl.store(out_ptr + N + token, low, mask=inside)


def store_logits(model: Linear, softmax: Softmax, tile_sum: Tensor, valid_tokens: ValidTokens) -> None:
    """Writes logits and tile maxima into `softmax`, and the (T, n) sums of exp(u) into `tile_sum`."""
    backend_for(model.rows).logits(
        model.rows,
        model.weight,
        model.bias,
        MaxSum(tile_sum, softmax.tile_max, softmax.logits if softmax.softcap is None else None),
        model.options,
        valid_tokens,
        out=softmax.logits,
        before_softcap=softmax.softcap is not None,
    )


def share_denominators(softmaxes: list[Softmax], group: str | None, ranks: int) -> None:
    """Replaces the denominators of this rank's columns by those of whole rows."""
    if ranks == 1:
        return
    row_max, log_sum = torch.stack([softmax.shift for softmax in softmaxes]).unbind(1)  # (k, n) each
    denominators = log_denominator(row_max, log_sum, group, ranks, torch.exp2, torch.log2)
    for softmax, denominator in zip(softmaxes, denominators):
        softmax.shift[1] = denominator
