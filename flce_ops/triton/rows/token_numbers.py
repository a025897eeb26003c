"""The numbers of a chunk's tokens that a function of one token reads, and its losses and slopes.

    log_prob, lse = from the sums of a row          one kernel
    losses, slopes = the function, by autograd      torch's operations on (n,): objectives/token_function.py

Rows after the valid ones hold no token, and the host does not know how many there are. The function sees harmless
numbers there.
"""

import triton.language as tl
from torch import Tensor

from ...objectives.in_triton import LN2
from ...objectives.token_function import Slopes
from ...objectives.token_objective import FunctionObjective, GivenLosses, LossesOfRows
from ...support.integers import cdiv
from ..kernel import Kernel, launches
from ..steps.exponentials import RowSums
from .finish_rows import ROWS, TILES, Tokens, row_sums
from .logit_numbers import rescaled, surprisal_in_nats
from .topk import topk_at_a_time
from .valid_tokens import ValidTokens, row_vectors, valid_rows

# N tokens, n rows of a chunk, K classes of a token, C numbers of a token

BLOCK = 1024  # numbers that a program moves


@Kernel
def token_numbers_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    log_prob_ptr,  # (n,) or (n, K) out; -1 where no token or class counts
    lse_ptr,  # (n,) out; 0 where no token is
    n,
    T,  # tiles of `sums`
    TOPK: tl.constexpr,
    SOFT: tl.constexpr,  # tokens have K classes (K may be 1)
    BLOCK_N: tl.constexpr,  # 1 for soft targets
    BLOCK_TOPK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = valid_rows(tokens.valid_tokens, n)
    mask = i < count
    token = tl.load(tokens.valid_tokens.order + i, mask=i < n, other=0)
    reference = tl.load(sums.reference_logit + i, mask=mask, other=0.0)
    row_sum = row_sums(tokens, sums, i, reference, count, n, T, TOPK, SOFT, BLOCK_TOPK, BLOCK_T)
    tl.store(sums.exponentials + i, row_sum, mask=mask)
    log2_sum = tl.log2(row_sum)
    high, low = rescaled(reference, log2_sum, LN2)
    tl.store(lse_ptr + i, tl.where(mask, high + low, 0.0), mask=i < n)
    row_topk, token_topk = i.to(tl.int64) * TOPK, token.to(tl.int64) * TOPK
    for start in range(0, TOPK, BLOCK_TOPK):
        k = start + tl.arange(0, BLOCK_TOPK)
        inside = (k < TOPK) & (i < n)
        here = tl.load(tokens.column + row_topk + k, mask=inside & mask, other=-1) >= 0
        logit = tl.load(tokens.target_logit + row_topk + k, mask=inside & mask, other=0.0)
        log_prob = -surprisal_in_nats(logit, reference + tl.zeros_like(logit), log2_sum + tl.zeros_like(logit))
        tl.store(log_prob_ptr + row_topk + k, tl.where(here, log_prob, -1.0), mask=inside)
        tl.store(tokens.log_probs + token_topk + k, tl.where(here, log_prob, 0.0), mask=inside)


@Kernel
def in_order_kernel(
    values_ptr,  # (N, C)
    out_ptr,  # (N, C), row i: that of the valid token i; 0 after the valid tokens
    valid_tokens,  # ValidTokens
    N,
    C,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, inside = place // C, place < N.to(tl.int64) * C
    mask = inside & (row < tl.load(valid_tokens.total))
    token = tl.load(valid_tokens.order + row, mask=mask, other=0).to(tl.int64)
    tl.store(out_ptr + place, tl.load(values_ptr + token * C + place % C, mask=mask, other=0), mask=inside)


def launch_in_order(values: Tensor, valid_tokens: ValidTokens) -> Tensor:  # (N, ...)
    """The values of the valid tokens, in their order."""
    values = values.contiguous()
    out = values.new_empty(values.shape)
    if values.numel():
        columns = values.numel() // values.shape[0]
        in_order_kernel[(cdiv(values.numel(), BLOCK),)](
            values, out, valid_tokens, values.shape[0], columns, BLOCK=BLOCK, num_warps=4
        )
    return out


def launch_token_function(objective: FunctionObjective, tokens: Tokens, sums: RowSums) -> tuple[GivenLosses, RowSums]:
    """The results of the function for a chunk. `objective` has its tensors by rows of the chunk."""
    column, soft = tokens.column, tokens.column.dim() == 2
    n, rows, topk = column.shape[0], 1 if soft else ROWS, column.shape[1] if soft else 1
    log_prob, lse = row_vectors(column, 2, n)
    if soft:
        log_prob = lse.new_empty(column.shape)
    token_numbers_kernel[(cdiv(n, rows),)](
        tokens,
        sums,
        log_prob,
        lse,
        n,
        0 if sums.tiles is None else sums.tiles.shape[0],
        TOPK=topk,
        SOFT=soft,
        BLOCK_N=rows,
        BLOCK_TOPK=topk_at_a_time(topk),
        BLOCK_T=TILES,
        num_warps=4,
    )
    function, reads_lse = objective.options, "lse" in objective.options.reads
    if launches.only_compile:
        losses, slopes = lse, Slopes(log_prob, lse if reads_lse else None)
    else:
        losses, slopes = function.losses_and_slopes(log_prob, lse if reads_lse else None, objective.tokens)
    by_log_prob = slopes.log_prob.masked_fill(column < 0, 0.0) if soft else slopes.log_prob.contiguous()
    of_rows = LossesOfRows(losses.contiguous(), None if slopes.lse is None else slopes.lse.contiguous())
    return GivenLosses(tokens=of_rows, weight=by_log_prob), sums._replace(tiles=None)
