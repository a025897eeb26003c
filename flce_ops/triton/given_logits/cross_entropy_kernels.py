"""The loss of given logits: one program a row, which memory reads once and whose gradient it writes once.

                      V
        ┌──┬──┬──┬──┬──┬──┬──┐    the first blocks of a row stay in registers; the others are read a second time, latest
      i │▓▓│▓▓│▓▓│▓▓│  │  │  │    first, from the L2 cache: it has room for those of all rows that are taken at a time
        └──┴──┴──┴──┴──┴──┴──┘    (50 MB on H100 and H200, of which about a half holds what one side of the chip reads)

    for each block:              m, s, and where asked for  sum_j w_j z_j, argmax        logit_rows.py
    lse = (m + log2 s) ln 2      loss, l, a of the objective           flce_ops/objectives
    ask for row i + rows taken at a time
    for each block:              G = (l / s 2^(z - m) + m_i w) dz/du                     and a at the target

A row whose target is ignored is not read; its gradient is zeros.
"""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from ...objectives.in_triton import LN2
from ..gemm.logits_gemm import base2_logits
from ..launch.replay import Kernel
from ..rows.logit_numbers import numbers_of
from ..rows.sum_losses import scale_of_rows
from ..rows.two_sum import in_two_float32
from .logit_gradient import finish_gradient, out_of, store_gradient
from .logit_rows import (
    LOWEST,
    add_block,
    as_loaded,
    ask_for,
    edges_of,
    load_block,
    numbers_in,
    row_of,
    target_of,
    whole_row,
)

# N tokens, V vocabulary


class ForwardNumbers(NamedTuple):
    """(N,) each, as meta.forward_outputs has them; None where not asked for."""

    target_logit: Tensor
    lse: Tensor
    logit_sum: Tensor | None
    argmax: Tensor | None
    lse_rest: Tensor


class KnownRows(NamedTuple):
    """What forward found of the rows, and their cotangents; (N,) each. Without `lse` nothing is known."""

    lse: Tensor | None = None
    lse_rest: Tensor | None = None
    grad_target_logit: Tensor | None = None
    grad_lse: Tensor | None = None
    grad_logit_sum: Tensor | None = None


NOTHING_KNOWN = KnownRows()


class LossResults(NamedTuple):
    """Beside the gradient; (N,) each."""

    losses: Tensor
    argmax: Tensor | None  # None where not asked for


@Kernel
def rows_kernel(
    logits,  # Matrix
    grad_logits,  # Matrix, out, perhaps the same; None for the numbers of the rows alone
    target_ptr,  # (N,)
    known,  # KnownRows, of which G is made without a sum; of nothing where the row is summed
    reduction,  # Reduction, and the valid tokens, whose number divides a mean; None without a loss, as the next
    valid_tokens,  # Count
    outputs,  # ForwardNumbers, or of a loss LossResults
    class_weight_ptr,  # (V,) float32
    objective,  # None without a loss, as the next
    d_sum,  # the derivative of a loss by its logit sum
    logit_numbers,  # LogitNumbers
    ignore_index,
    later,  # rows that are taken at a time
    N,
    V,
    OF_TARGET: tl.constexpr,
    OF_ROW: tl.constexpr,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    ALIKE: tl.constexpr,  # rows of logits and of grad_logits lie alike beside multiples of 16 bytes
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    HELD: tl.constexpr,  # a row's first blocks, in registers
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks of row i + later that are asked for as row i is written
):
    DTYPE: tl.constexpr = logits.pointer.dtype.element_ty
    i = tl.program_id(0)
    valid, column = target_of(target_ptr, i, ignore_index, V)
    logit_scale, softcap = numbers_of(logit_numbers, i, valid)
    row, head, groups = row_of(logits, i, V, VEC)
    groups_ptr = tl.multiple_of(row + head, 16)
    last = groups // BLOCK_G
    held = ()
    for block in tl.static_range(HELD):
        held += (load_block(groups_ptr, block, groups, valid, BLOCK_G, False, "evict_first"),)  # type: ignore[assignment]
    end = load_block(groups_ptr, last, groups, valid, BLOCK_G, True, "evict_first")
    edge, there = edges_of(head, groups, V, VEC)
    # what the gradient may be written over is read before
    u_target = tl.load(row + column, mask=valid, other=0.0)
    u_edges = tl.load(row + edge, mask=there & valid, other=0.0)

    if known.lse is None:
        m = tl.full((BLOCK_G,), LOWEST, tl.float32)
        s = tl.zeros((BLOCK_G,), tl.float32)
        logit_sums = tl.zeros((BLOCK_G,), tl.float32)
        columns = tl.zeros((BLOCK_G,), tl.int32)
        for block in tl.static_range(HELD):
            m, s, logit_sums, columns = add_block(
                m, s, logit_sums, columns, numbers_in(held[block], DTYPE), block, head, groups, V, class_weight_ptr,
                logit_numbers, logit_scale, softcap, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False,
            )  # fmt: skip
        for streamed in tl.range(HELD, tl.where(valid, last, HELD), num_stages=STAGES):
            words = load_block(groups_ptr, streamed, groups, valid, BLOCK_G, False, "evict_last")
            m, s, logit_sums, columns = add_block(
                m, s, logit_sums, columns, numbers_in(words, DTYPE), streamed, head, groups, V, class_weight_ptr,
                logit_numbers, logit_scale, softcap, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False,
            )  # fmt: skip
        m, s, logit_sums, columns = add_block(
            m, s, logit_sums, columns, numbers_in(end, DTYPE), last, head, groups, V, class_weight_ptr, logit_numbers,
            logit_scale, softcap, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, True,
        )  # fmt: skip
        row_max, row_sum, logit_sum2, argmax = whole_row(
            m, s, logit_sums, columns, u_edges, edge, there, V, class_weight_ptr, logit_numbers, logit_scale, softcap,
            LOGIT_SUM, ARGMAX,
        )  # fmt: skip
        row_max, row_sum = tl.where(valid, row_max, 0.0), tl.where(valid, row_sum, 1.0)
        if ARGMAX:
            tl.store(outputs.argmax + i, tl.where(valid, argmax, -1).to(tl.int64))
        target_logit2, _ = base2_logits(u_target.to(tl.float32), None, logit_numbers, logit_scale, softcap)
        log2_sum = tl.log2(row_sum)
    if grad_logits is None:
        lse64 = (row_max.to(tl.float64) + log2_sum.to(tl.float64)) * 0.6931471805599453
        lse, rest = in_two_float32(lse64)
        tl.store(outputs.target_logit + i, tl.where(valid, target_logit2 * LN2, 0.0))
        tl.store(outputs.lse + i, lse)
        tl.store(outputs.lse_rest + i, rest.to(tl.float32))
        if LOGIT_SUM:
            tl.store(outputs.logit_sum + i, tl.where(valid, logit_sum2 * LN2, 0.0))
    else:
        if known.lse is None:
            if AHEAD > 0:
                coming = tl.minimum(i + later, N - 1)
                counts, _ = target_of(target_ptr, coming, ignore_index, V)
                next_row, next_head, next_groups = row_of(logits, coming, V, VEC)
                ask_for(
                    next_row + next_head,
                    tl.where(counts & (i + later < N), tl.minimum(next_groups, AHEAD * BLOCK_G), 0),
                    BLOCK_G,
                )
            target_weight = None
            if class_weight_ptr is not None:
                target_weight = tl.load(class_weight_ptr + column)
            logit_sum = None
            if LOGIT_SUM:
                logit_sum = logit_sum2 * LN2
            surprisal2 = (row_max - target_logit2) + log2_sum
            surprisal2 = tl.where(surprisal2 < 0.0, 0.0, surprisal2)  # a rounding of target_logit2
            value, slope = OF_TARGET(surprisal2 * LN2, target_weight, None, objective)
            value, d_lse = OF_ROW(value, slope, (row_max + log2_sum) * LN2, logit_sum, None, objective)
            tl.store(outputs.losses + i, tl.where(valid, value, 0.0))
            scale = tl.where(valid, scale_of_rows(reduction, valid_tokens, i, valid), 0.0) * logit_scale
            factor = scale * d_lse / row_sum
            sum_factor = None
            if LOGIT_SUM:
                sum_factor = scale * d_sum
            at_target = -scale * slope
        else:
            lse = tl.load(known.lse + i, mask=valid, other=0.0).to(tl.float64)
            lse2 = (lse + tl.load(known.lse_rest + i, mask=valid, other=0.0).to(tl.float64)) * 1.4426950408889634
            row_max = lse2.to(tl.float32)
            factor, sum_factor, at_target = 0.0, None, 0.0
            if known.grad_lse is not None:
                share = tl.exp2((row_max.to(tl.float64) - lse2).to(tl.float32))  # what rounding the reference takes
                factor = tl.load(known.grad_lse + i, mask=valid, other=0.0).to(tl.float32) * logit_scale * share
            if known.grad_logit_sum is not None:
                sum_factor = tl.load(known.grad_logit_sum + i, mask=valid, other=0.0).to(tl.float32) * logit_scale
            if known.grad_target_logit is not None:
                at_target = tl.load(known.grad_target_logit + i, mask=valid, other=0.0).to(tl.float32) * logit_scale
        out_row, out_groups_ptr = out_of(grad_logits, i, head, ALIKE)
        store_gradient(
            out_groups_ptr, as_loaded(end), last, head, groups, row_max, factor, sum_factor, class_weight_ptr,
            logit_numbers, logit_scale, softcap, BLOCK_G, VEC, True,
        )  # fmt: skip
        for back in tl.range(0, last - HELD, num_stages=STAGES):
            again = last - 1 - back
            words = load_block(groups_ptr, again, groups, valid, BLOCK_G, False, "evict_first")
            store_gradient(
                out_groups_ptr, words, again, head, groups, row_max, factor, sum_factor, class_weight_ptr,
                logit_numbers, logit_scale, softcap, BLOCK_G, VEC, False,
            )  # fmt: skip
        for block in tl.static_range(HELD):
            store_gradient(
                out_groups_ptr, as_loaded(held[block]), block, head, groups, row_max, factor, sum_factor,
                class_weight_ptr, logit_numbers, logit_scale, softcap, BLOCK_G, VEC, False,
            )  # fmt: skip
        finish_gradient(
            out_row, u_edges, edge, there, u_target, column, V, row_max, factor, sum_factor, at_target,
            class_weight_ptr, logit_numbers, logit_scale, softcap,
        )  # fmt: skip
