"""The kernel of given logits: one program per row. It reads the row from HBM once and writes its gradient once.

                 V
        ┌──┬──┬──┬──┬──┬──┬──┐    The first blocks of a row stay in registers. The others are read twice, the second
      i │▓▓│▓▓│▓▓│▓▓│  │  │  │    time backwards, from the L2 cache. The L2 has room for the rows of all running
        └──┴──┴──┴──┴──┴──┴──┘    programs: 50 MB on H100 and H200, half of which holds what one side of the chip reads.

    for each block:              m, s, and where asked for  sum_j w_j (z_j - lse), argmax        row_blocks.py
    lse = m + ln s               loss, l, a of the objective           flce_ops/objectives
    prefetch row i + later
    for each block:              G = (l / s e^(z - m) + m_i w) dz/du                     and a at the target

Rows with an ignored target are not read. Their gradient is zeros.
"""

import triton.language as tl

from ...objectives.in_triton import LN2
from ..kernel import Kernel, everywhere
from ..rows.after_chunks import scale_of_rows
from ..rows.logit_numbers import loaded
from .row_blocks import (
    LOWEST,
    Scores,
    Slopes,
    add_block,
    as_loaded,
    ask_for,
    edges_of,
    exp_below,
    finish_gradient,
    load_block,
    logits_of,
    numbers_in,
    out_of,
    row_of,
    store_gradient,
    target_of,
    whole_row,
)

# N tokens, V vocabulary


@Kernel
def rows_kernel(
    logits,  # Matrix
    grad_logits,  # Matrix, out, may be the same; None: only the numbers of the rows
    target_ptr,  # (N,)
    known,  # KnownRows, from which G is made; if its fields are None, the kernel first sums the row
    reduction,  # Reduction; None without a loss
    valid_tokens,  # Count of valid tokens, which divides a mean; None without a loss
    results,  # RowOutputs, out
    class_weight_ptr,  # (V,) float32
    objective,  # None without a loss
    d_sum,  # the loss's derivative by the logit sum; None without a loss
    logit_numbers,  # LogitNumbers
    ignore_index,
    later,  # the number of rows in flight: row i + later is prefetched
    N,
    V,
    OF_TARGET: tl.constexpr,
    OF_ROW: tl.constexpr,
    ALIKE: tl.constexpr,  # rows of logits and grad_logits have equal alignment
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    HELD: tl.constexpr,  # blocks that stay in registers, the first of the row
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks of row i + later to prefetch before row i's gradient is written
):
    DTYPE: tl.constexpr = logits.pointer.dtype.element_ty
    LOGIT_SUM: tl.constexpr = d_sum is not None or results.logit_sum is not None
    ARGMAX: tl.constexpr = results.argmax is not None
    i = tl.program_id(0)
    valid, column = target_of(target_ptr, i, ignore_index, V)
    scores = Scores(logit_numbers, loaded(logit_numbers), class_weight_ptr)
    logit_scale = scores.numbers.logit_scale
    row = row_of(logits, i, V, VEC)
    groups_ptr = tl.multiple_of(row.pointer + row.head, 16)
    last = row.groups // BLOCK_G
    held = ()
    for block in tl.static_range(HELD):
        held += (load_block(groups_ptr, block, row.groups, valid, BLOCK_G, False, "evict_first"),)  # type: ignore[assignment]
    end = load_block(groups_ptr, last, row.groups, valid, BLOCK_G, True, "evict_first")
    edge, there = edges_of(row, VEC)
    # read first, because the gradient may overwrite the logits
    u_target = tl.load(row.pointer + column, mask=valid, other=0.0)
    u_edges = tl.load(row.pointer + edge, mask=there & everywhere(valid, there), other=0.0)

    if known.lse_pair is None:
        m = tl.full((BLOCK_G,), LOWEST, tl.float32)
        s = tl.zeros((BLOCK_G,), tl.float32)
        logit_sums = tl.zeros((BLOCK_G,), tl.float32)
        weight_sums = tl.zeros((BLOCK_G,), tl.float32)
        columns = tl.zeros((BLOCK_G,), tl.int32)
        for block in tl.static_range(HELD):
            u = numbers_in(held[block], DTYPE)
            m, s, logit_sums, weight_sums, columns = add_block(
                m, s, logit_sums, weight_sums, columns, u, block, row, scores, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False
            )
        for streamed in tl.range(HELD, tl.where(valid, last, HELD), num_stages=STAGES):
            u = numbers_in(load_block(groups_ptr, streamed, row.groups, valid, BLOCK_G, False, "evict_last"), DTYPE)
            m, s, logit_sums, weight_sums, columns = add_block(
                m, s, logit_sums, weight_sums, columns, u, streamed, row, scores, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False
            )
        u = numbers_in(end, DTYPE)
        m, s, logit_sums, weight_sums, columns = add_block(
            m, s, logit_sums, weight_sums, columns, u, last, row, scores, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, True
        )
        row_max, row_sum, log2_sum, logit_sum, argmax = whole_row(
            m, s, logit_sums, weight_sums, columns, u_edges, edge, there, V, scores, LOGIT_SUM, ARGMAX
        )
        row_max, row_sum = tl.where(valid, row_max, 0.0), tl.where(valid, row_sum, 1.0)
        log2_sum = tl.where(valid, log2_sum, 0.0)
        if ARGMAX:
            tl.store(results.argmax + i, tl.where(valid, argmax, -1).to(tl.int64))
        target_logit, _ = logits_of(u_target, scores)
    if grad_logits is None:
        tl.store(results.target_logit + i, tl.where(valid, target_logit, 0.0))
        tl.store(results.lse_pair + 2 * i, row_max)
        tl.store(results.lse_pair + 2 * i + 1, log2_sum * LN2)
        if LOGIT_SUM:
            tl.store(results.logit_sum + i, tl.where(valid, logit_sum, 0.0))
    else:
        if known.lse_pair is None:
            if AHEAD > 0:
                coming = tl.minimum(i + later, N - 1)
                counts, _ = target_of(target_ptr, coming, ignore_index, V)
                next_row = row_of(logits, coming, V, VEC)
                ahead = tl.minimum(next_row.groups, AHEAD * BLOCK_G)
                ask_for(next_row, tl.where(counts & (i + later < N), ahead, 0), BLOCK_G)
            target_weight = None
            if class_weight_ptr is not None:
                target_weight = tl.load(class_weight_ptr + column)
            asked_sum = None
            if LOGIT_SUM:
                asked_sum = logit_sum
            log_sum = log2_sum * LN2
            surprisal = (row_max - target_logit) + log_sum
            surprisal = tl.where(surprisal < 0.0, 0.0, surprisal)  # rounding of row_sum can make it negative
            value, slope = OF_TARGET(surprisal, target_weight, None, objective)
            value, d_lse = OF_ROW(value, slope, row_max + log_sum, asked_sum, None, objective)
            tl.store(results.losses + i, tl.where(valid, value, 0.0))
            scale = tl.where(valid, scale_of_rows(reduction, valid_tokens, i, valid), 0.0) * logit_scale
            factor = scale * d_lse / row_sum
            sum_factor = None
            if LOGIT_SUM:
                sum_factor = scale * d_sum
            at_target = -scale * slope
        else:
            row_max = tl.load(known.lse_pair + 2 * i, mask=valid, other=0.0)
            factor, sum_factor, at_target = 0.0, None, 0.0
            if known.grad_lse is not None:
                share = exp_below(-tl.load(known.lse_pair + 2 * i + 1, mask=valid, other=0.0))
                factor = tl.load(known.grad_lse + i, mask=valid, other=0.0).to(tl.float32) * logit_scale * share
            if known.grad_logit_sum is not None:
                sum_factor = tl.load(known.grad_logit_sum + i, mask=valid, other=0.0).to(tl.float32) * logit_scale
            if known.grad_target_logit is not None:
                at_target = tl.load(known.grad_target_logit + i, mask=valid, other=0.0).to(tl.float32) * logit_scale
        slopes = Slopes(row_max, factor, sum_factor, at_target)
        out_row, out_groups_ptr = out_of(grad_logits, i, row, ALIKE)
        store_gradient(out_groups_ptr, as_loaded(end), last, row, slopes, scores, BLOCK_G, VEC, True)
        for back in tl.range(0, last - HELD, num_stages=STAGES):
            again = last - 1 - back
            words = load_block(groups_ptr, again, row.groups, valid, BLOCK_G, False, "evict_first")
            store_gradient(out_groups_ptr, words, again, row, slopes, scores, BLOCK_G, VEC, False)
        for block in tl.static_range(HELD):
            words = as_loaded(held[block])
            store_gradient(out_groups_ptr, words, block, row, slopes, scores, BLOCK_G, VEC, False)
        finish_gradient(out_row, u_edges, edge, there, u_target, column, V, slopes, scores)
