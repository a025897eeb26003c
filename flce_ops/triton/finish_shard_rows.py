"""Rows of a chunk on a rank that holds some of the classes: what it tells the others, and what all of them make of it.

Logits, references and log-sums are in base 2 (times log2 e), but for the losses.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.math.shards import lse_of_shards
from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import (
    BLOCK_N,
    FinishedRows,
    Tokens,
    empty_rows,
    store_factors,
    store_losses,
    sums_of_rows,
)
from flce_ops.triton.kept_tokens import kept_rows
from flce_ops.triton.replay import Kernel
from flce_ops.triton.row_loss import RowLoss

# n rows of a chunk, V vocabulary of all ranks, R ranks that share it, k numbers a row of each

# lse2 - r beyond this: this rank's classes have probabilities below 2^-30, and 2^-90 leaves c * input normal numbers.
LARGEST_EXPONENT = tl.constexpr(90.0)


@Kernel
@triton.jit
def shard_numbers_kernel(
    tokens,  # Tokens
    sums,  # RowSums
    numbers_ptr,  # (k, n) out: lse2 of this rank's classes, z2 of the target or 0, and their logit sum if it is there
    n,
    BLOCK_N: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < kept_rows(tokens.kept, n)
    row_sum, _, reference_logit, target_logit, hit = sums_of_rows(tokens, sums, i, mask)
    tl.store(numbers_ptr + i, reference_logit + tl.log2(row_sum), mask=mask)
    tl.store(numbers_ptr + n + i, tl.where(hit, target_logit, 0.0), mask=mask)
    if sums.logit_sum is not None:
        tl.store(numbers_ptr + 2 * n + i, tl.load(sums.logit_sum + i, mask=mask, other=0.0), mask=mask)


def launch_shard_numbers(tokens: Tokens, sums: RowSums) -> Tensor:
    """(k, n), to be exchanged: 2, 3 with logit sums. With argmax 2 more, which the caller fills in behind them."""
    n = tokens.column.shape[0]
    numbers = tokens.losses.new_empty(2 + (sums.logit_sum is not None) + 2 * (sums.argmax is not None), n)
    shard_numbers_kernel[(triton.cdiv(n, BLOCK_N),)](tokens, sums, numbers, n, BLOCK_N=BLOCK_N, num_warps=2)
    return numbers


@Kernel
@triton.jit
def finish_shard_rows_kernel(
    lse2_ptr,  # (n,) of whole rows
    target_logit_ptr,  # (n,)
    tokens,  # Tokens
    sums,  # RowSums
    finished,  # FinishedRows, out
    n,
    loss,  # RowLoss
    logit_scale_ptr,  # ()
    BLOCK_N: tl.constexpr,
):
    """As finish_rows.py, with the lse of whole rows in place of this rank's row sum:

        c = l logit_scale 2^-(lse2 - r)      E'_iy = (E_iy + a / l 2^(lse2 - r)) dz/du_y

    where this rank holds the target, E' = E elsewhere.
    """
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < kept_rows(tokens.kept, n)
    lse2 = tl.load(lse2_ptr + i, mask=mask, other=0.0)
    target_logit = tl.load(target_logit_ptr + i, mask=mask, other=0.0)
    row_sum, at_target, reference_logit, _, hit = sums_of_rows(tokens, sums, i, mask)
    scaled_d_lse, d_lse, d_target = store_losses(
        tokens,
        sums,
        i,
        n,
        mask,
        lse2 - target_logit,
        lse2,
        loss,
        logit_scale_ptr,
    )
    # 0 where a bias of -inf switches off all classes of this rank (nan if those of all ranks)
    exponent = tl.where(row_sum > 0.0, lse2 - reference_logit, 0.0 * lse2)
    exponent = tl.where(exponent > LARGEST_EXPONENT, LARGEST_EXPONENT, exponent)
    entry = at_target + d_target / d_lse * tl.exp2(exponent)
    tl.store(finished.row_sum + i, tl.exp2(exponent), mask=mask)
    store_factors(tokens, finished, i, mask, hit, entry, scaled_d_lse * tl.exp2(-exponent))


def launch_finish_shard_rows(
    gathered: Tensor,  # (R, k, n) every rank's numbers
    tokens: Tokens,
    sums: RowSums,
    loss: RowLoss,
    dtype: torch.dtype,  # of E
    *,
    logit_scale: Tensor | None,  # ()
) -> FinishedRows:
    finished, n = empty_rows(tokens, dtype), tokens.column.shape[0]
    finished = finished._replace(row_sum=torch.empty_like(sums.exponentials))
    if sums.logit_sum is not None:
        sums = sums._replace(logit_sum=gathered[:, 2].sum(0))
    finish_shard_rows_kernel[(triton.cdiv(n, BLOCK_N),)](
        lse_of_shards(gathered[:, 0], torch.exp2, torch.log2),
        gathered[:, 1].sum(0),
        tokens,
        sums,
        finished,
        n,
        loss,
        logit_scale,
        BLOCK_N=BLOCK_N,
        num_warps=2,
    )
    return finished
