"""Rows of a chunk whose loss is a policy's: log-probabilities, then the losses of all tokens once these are known."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.exponentials import RowSums
from flce_ops.triton.finish_rows import (
    BLOCK_N,
    FinishedRows,
    Tokens,
    empty_rows,
    store_factors,
    sums_of_rows,
)
from flce_ops.triton.kept_tokens import kept_rows, written_rows
from flce_ops.triton.logits_gemm import LN2, number_at
from flce_ops.triton.replay import Kernel
from flce_ops.triton.row_policy import Policy, token_policy
from flce_ops.triton.sum_losses import scale_of_rows

# N tokens, n rows of a chunk, V vocabulary


@Kernel
@triton.jit
def finish_policy_rows_kernel(
    tokens,  # Tokens; log-probabilities go to its losses
    sums,  # RowSums
    finished,  # FinishedRows, out
    n,
    policy,  # Policy
    logit_scale_ptr,  # ()
    OBJECTIVE: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As finish_rows.py, with l = -g f' and a = g f' (f' the slope; row_policy.py):

        G_ij = g f' ([j = y] - p_ij) dz/du = c E'_ij         c = -g f' logit_scale / Z
                                                             E'_iy = (E_iy - Z) dz/du_y,  E' = E elsewhere

    No slope divides another, so that a row of slope 0 has c = 0 and gradient 0.
    """
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = i < kept_rows(tokens.kept, n)
    row_sum, at_target, reference_logit, target_logit, hit = sums_of_rows(tokens, sums, i, mask)
    log_prob = ((target_logit - reference_logit) - tl.log2(row_sum)) * LN2
    token = tl.load(tokens.kept.order + i, mask=i < n, other=0)
    tl.store(tokens.losses + token, tl.where(mask, log_prob, 0.0), mask=written_rows(tokens.kept, i, n))
    scale = scale_of_rows(tokens.reduction, tokens.kept, token, mask)
    _, slope = token_policy(log_prob, token, mask, scale, policy, OBJECTIVE, ESTIMATOR)
    factor = -slope * number_at(logit_scale_ptr) / row_sum
    store_factors(tokens, finished, i, mask, hit, at_target - row_sum, factor)


def launch_finish_policy_rows(
    tokens: Tokens,
    sums: RowSums,
    policy: Policy,
    names: dict[str, str],
    dtype: torch.dtype,  # of E
    *,
    logit_scale: Tensor | None,  # ()
) -> FinishedRows:
    finished, n = empty_rows(tokens, dtype), tokens.column.shape[0]
    finish_policy_rows_kernel[(triton.cdiv(n, BLOCK_N),)](
        tokens, sums, finished, n, policy, logit_scale, **names, BLOCK_N=BLOCK_N, num_warps=2
    )
    return finished


@Kernel
@triton.jit
def policy_losses_kernel(
    log_probs_ptr,  # (N,)
    place_ptr,  # (N,) -1 where ignored
    losses_ptr,  # (N,) out
    N,
    policy,  # Policy
    OBJECTIVE: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < N
    mask = tl.load(place_ptr + token, mask=inside, other=-1) >= 0
    log_prob = tl.load(log_probs_ptr + token, mask=mask, other=0.0)
    loss, _ = token_policy(log_prob, token, mask, 1.0, policy, OBJECTIVE, ESTIMATOR)
    tl.store(losses_ptr + token, tl.where(mask, loss, 0.0), mask=inside)


def launch_policy_losses(
    log_probs: Tensor, place: Tensor, losses: Tensor, policy: Policy, names: dict[str, str]
) -> None:  # (N,) each
    tokens = losses.shape[0]
    policy_losses_kernel[(triton.cdiv(tokens, 1024),)](
        log_probs, place, losses, tokens, policy, **names, BLOCK=1024, num_warps=4
    )
