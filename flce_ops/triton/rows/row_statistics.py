"""Statistics of rows from their sums, in nats, written to the tokens' places. Launched only if one is requested.

With r the reference, E = 2^(z - r), Z = sum_j E_j, and everything in base 2:

    lse               r + log Z
    entropy           log Z - sum_j E_j (z_j - r) / Z
    log_sum_sq_probs  log sum_j E_j^2 - 2 log Z
    mean_logit        sum_j z_j / V

The entropy and log_sum_sq_probs use differences from r, so a large r costs them no digits. sum_j E_j^2 is at most Z^2,
which is below 2^120: if Z is 2^60 or more, a rescue chooses a larger r (steps/exponentials.py). The sum is at least 1,
because r is the logit of one of the classes.
"""

import triton.language as tl

from ...math.options import Statistics, TokenStatistics
from ...objectives.in_triton import LN2
from ...support.integers import cdiv
from ..kernel import Kernel
from ..steps.exponentials import Asked, RowSums
from .two_sum import lse_in_nats
from .valid_tokens import ValidTokens, valid_rows

# N tokens, n rows of a chunk, V vocabulary

BLOCK_N = 64


def sums_for(asked: Statistics) -> Asked:
    """The sums that the requested statistics need."""
    return Asked(False, asked.entropy, asked.argmax, asked.log_sum_sq_probs, asked.mean_logit)


def sum_pairs(asked: Statistics) -> int:
    """How many pairs of numbers, rounded up, the epilogue stores for each row and tile because of these statistics."""
    return cdiv(sums_for(asked).numbers, 2)


@Kernel
def row_statistics_kernel(
    sums,  # RowSums
    statistics,  # TokenStatistics, out
    valid_tokens,  # ValidTokens
    n,
    V,
    BLOCK_N: tl.constexpr,
):
    """Ignored tokens get 0, and an argmax of -1."""
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < n
    mask = i < valid_rows(valid_tokens, n)
    token = tl.load(valid_tokens.order + i, mask=inside, other=0)
    if statistics.argmax is not None:
        tl.store(statistics.argmax + token, tl.load(sums.argmax + i, mask=mask, other=-1), mask=inside)
    row_sum = tl.load(sums.exponentials + i, mask=mask, other=1.0)
    log2_sum = tl.log2(row_sum)
    if statistics.lse is not None:
        lse, _ = lse_in_nats(tl.load(sums.reference_logit + i, mask=mask, other=0.0), log2_sum)
        tl.store(statistics.lse + token, tl.where(mask, lse, 0.0), mask=inside)
    if statistics.entropy is not None:
        entropy2 = log2_sum - tl.load(sums.expected + i, mask=mask, other=0.0) / row_sum
        tl.store(statistics.entropy + token, tl.where(mask, entropy2 * LN2, 0.0), mask=inside)
    if statistics.log_sum_sq_probs is not None:
        log2_squares = tl.log2(tl.load(sums.squares + i, mask=mask, other=1.0)) - 2.0 * log2_sum
        tl.store(statistics.log_sum_sq_probs + token, tl.where(mask, log2_squares * LN2, 0.0), mask=inside)
    if statistics.mean_logit is not None:
        mean2 = tl.load(sums.total + i, mask=mask, other=0.0) / V
        tl.store(statistics.mean_logit + token, tl.where(mask, mean2 * LN2, 0.0), mask=inside)


def launch_row_statistics(
    sums: RowSums, statistics: TokenStatistics, valid_tokens: ValidTokens, num_classes: int
) -> None:
    """`statistics` has rows for all tokens, `sums` for those of `valid_tokens`."""
    if any(out is not None for out in statistics):
        n = valid_tokens.order.shape[0]
        row_statistics_kernel[(cdiv(n, BLOCK_N),)](
            sums, statistics, valid_tokens, n, num_classes, BLOCK_N=BLOCK_N, num_warps=2
        )
