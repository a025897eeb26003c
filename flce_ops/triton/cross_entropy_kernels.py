"""The loss of given logits: one program a row, which memory reads once and whose gradient it writes once.

                      V
        ┌──┬──┬──┬──┬──┬──┬──┐    a short row stays in registers; blocks of another are read a second time, latest
      i │  │  │  │  │  │  │  │    first: a row of 250 KiB a multiprocessor leaves the L2 cache (50 MB on H100 and H200)
        └──┴──┴──┴──┴──┴──┴──┘    room for all of them

    for each block:              m, s, and where asked for  sum_j w_j z_j, argmax        logit_rows.py
    lse = (m + log2 s) ln 2      loss, l, a = row_loss(...)                              row_loss.py
    for each block, backwards:   G = (l / s 2^(z - m) + m_i w) dz/du                     and a at the target

A row whose target is ignored is not read; its gradient is zeros.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flce_ops.triton.logit_gradient import finish_gradient, out_of, store_gradient, store_zeros
from flce_ops.triton.logit_rows import LOWEST, add_block, as_loaded, edges_of, load_block, numbers_in, row_of, whole_row
from flce_ops.triton.logits_gemm import LN2, base2_logits, number_at
from flce_ops.triton.replay import Kernel
from flce_ops.triton.row_loss import row_loss
from flce_ops.triton.sum_losses import scale_of_rows

# N tokens, V vocabulary


class ForwardNumbers(NamedTuple):
    """As meta.forward_outputs has them; None where not asked for."""

    target_logit: Tensor
    lse: Tensor
    logit_sum: Tensor | None
    argmax: Tensor | None
    lse_rest: Tensor


class LossNumbers(NamedTuple):
    losses: Tensor
    argmax: Tensor | None


@triton.jit
def target_column(target_ptr, i, ignore_index, V):
    """Whether the row counts, and its target; 0 for one out of range, which is refused elsewhere."""
    target = tl.load(target_ptr + i).to(tl.int64)
    inside = (target >= 0) & (target < V)
    return target != ignore_index, tl.where(inside, target, 0).to(tl.int32)


@Kernel
@triton.jit
def rows_kernel(
    logits,  # Matrix
    grad_logits,  # Matrix, out, perhaps the same; None for the numbers of the rows alone
    target_ptr,  # (N,)
    reduction,  # Reduction, and the kept tokens, whose number divides a mean; None without grad_logits
    kept,  # Count
    outputs,  # ForwardNumbers, or with grad_logits LossNumbers
    class_weight_ptr,  # (V,) float32
    loss,  # RowLoss; None without grad_logits
    logit_options,  # LogitOptions
    ignore_index,
    V,
    LOGIT_SUM: tl.constexpr,
    ARGMAX: tl.constexpr,
    ALIKE: tl.constexpr,  # rows of logits and of grad_logits lie alike beside multiples of 16 bytes
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    HELD: tl.constexpr,  # blocks in registers: all that a row has before its last one, or with STREAMED its first ones
    STREAMED: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = logits.pointer.dtype.element_ty
    i = tl.program_id(0)
    valid, column = target_column(target_ptr, i, ignore_index, V)
    row, head, groups = row_of(logits, i, V, VEC)
    groups_ptr = tl.multiple_of(row + head, 16)
    if grad_logits is not None:
        out_row, out_groups_ptr = out_of(grad_logits, i, head, ALIKE)
    if valid:
        logit_scale, softcap = number_at(logit_options.logit_scale), number_at(logit_options.softcap)
        edge, there = edges_of(head, groups, V, VEC)
        u_target = tl.load(row + column)
        u_edges = tl.load(row + edge, mask=there, other=0.0)

        m = tl.full((BLOCK_G,), LOWEST, tl.float32)
        s = tl.zeros((BLOCK_G,), tl.float32)
        logit_sums = tl.zeros((BLOCK_G,), tl.float32)
        columns = tl.zeros((BLOCK_G,), tl.int32)
        held = ()
        for block in tl.static_range(HELD):
            held += (load_block(groups_ptr, block, groups, BLOCK_G, False, "evict_first"),)  # type: ignore[assignment]
        last = HELD
        if STREAMED:
            last = groups // BLOCK_G
        end = load_block(groups_ptr, last, groups, BLOCK_G, True, "evict_first")
        for block in tl.static_range(HELD):
            m, s, logit_sums, columns = add_block(
                m, s, logit_sums, columns, numbers_in(held[block], DTYPE), block, head, groups, V, class_weight_ptr,
                logit_options, logit_scale, softcap, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False,
            )  # fmt: skip
        if STREAMED:
            for streamed in tl.range(HELD, last, num_stages=STAGES):
                words = load_block(groups_ptr, streamed, groups, BLOCK_G, False, "evict_last")
                m, s, logit_sums, columns = add_block(
                    m, s, logit_sums, columns, numbers_in(words, DTYPE), streamed, head, groups, V, class_weight_ptr,
                    logit_options, logit_scale, softcap, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False,
                )  # fmt: skip
        m, s, logit_sums, columns = add_block(
            m, s, logit_sums, columns, numbers_in(end, DTYPE), last, head, groups, V, class_weight_ptr, logit_options,
            logit_scale, softcap, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, True,
        )  # fmt: skip
        row_max, row_sum, logit_sum2, argmax = whole_row(
            m, s, logit_sums, columns, u_edges, edge, there, V, class_weight_ptr, logit_options, logit_scale, softcap,
            LOGIT_SUM, ARGMAX,
        )  # fmt: skip

        if ARGMAX:
            tl.store(outputs.argmax + i, argmax.to(tl.int64))
        target_logit2, target_slope = base2_logits(u_target.to(tl.float32), None, logit_options, logit_scale, softcap)
        log2_sum = tl.log2(row_sum)
        if grad_logits is None:
            lse64 = (row_max.to(tl.float64) + log2_sum.to(tl.float64)) * 0.6931471805599453
            lse = lse64.to(tl.float32)
            rest = (lse64 - lse.to(tl.float64)).to(tl.float32)
            tl.store(outputs.target_logit + i, target_logit2 * LN2)
            tl.store(outputs.lse + i, lse)
            tl.store(outputs.lse_rest + i, tl.where(tl.abs(rest) < float("inf"), rest, 0.0))
            if LOGIT_SUM:
                tl.store(outputs.logit_sum + i, logit_sum2 * LN2)
        else:
            target_weight = None
            if class_weight_ptr is not None:
                target_weight = tl.load(class_weight_ptr + column)
            smoothed_sum2 = None
            if LOGIT_SUM:
                smoothed_sum2 = logit_sum2
            surprisal2 = (row_max - target_logit2) + log2_sum
            surprisal2 = tl.where(surprisal2 < 0.0, 0.0, surprisal2)  # a rounding of target_logit2
            value, d_lse, d_target = row_loss(surprisal2, row_max + log2_sum, smoothed_sum2, target_weight, loss)
            tl.store(outputs.losses + i, value)
            scale = scale_of_rows(reduction, kept, i, valid) * logit_scale
            factor = scale * d_lse / row_sum
            sum_factor = None
            if LOGIT_SUM:
                sum_factor = -scale * loss.options.label_smoothing / V
            store_gradient(
                out_groups_ptr, as_loaded(end), last, head, groups, row_max, factor, sum_factor, class_weight_ptr,
                logit_options, logit_scale, softcap, BLOCK_G, VEC, True,
            )  # fmt: skip
            if STREAMED:
                for back in tl.range(0, last - HELD, num_stages=STAGES):
                    again = last - 1 - back
                    words = load_block(groups_ptr, again, groups, BLOCK_G, False, "evict_first")
                    store_gradient(
                        out_groups_ptr, words, again, head, groups, row_max, factor, sum_factor, class_weight_ptr,
                        logit_options, logit_scale, softcap, BLOCK_G, VEC, False,
                    )  # fmt: skip
            for block in tl.static_range(HELD):
                store_gradient(
                    out_groups_ptr, as_loaded(held[block]), block, head, groups, row_max, factor, sum_factor,
                    class_weight_ptr, logit_options, logit_scale, softcap, BLOCK_G, VEC, False,
                )  # fmt: skip
            finish_gradient(
                out_row, u_edges, edge, there, u_target, column, V, row_max, factor, sum_factor, scale * d_target,
                class_weight_ptr, logit_options, logit_scale, softcap,
            )  # fmt: skip
    else:
        if ARGMAX:
            tl.store(outputs.argmax + i, tl.full((), -1, tl.int64))
        if grad_logits is None:
            tl.store(outputs.target_logit + i, 0.0)
            tl.store(outputs.lse + i, 0.0)
            tl.store(outputs.lse_rest + i, 0.0)
            if LOGIT_SUM:
                tl.store(outputs.logit_sum + i, 0.0)
        else:
            tl.store(outputs.losses + i, 0.0)
            store_zeros(out_row, out_groups_ptr, head, groups, V, BLOCK_G, VEC)


@Kernel
@triton.jit
def gradient_kernel(
    logits,  # Matrix
    grad_logits,  # Matrix, out
    target_ptr,  # (N,)
    lse_ptr,  # (N,)
    lse_rest_ptr,  # (N,)
    cotangents,  # Cotangents, (N,) each or None
    class_weight_ptr,  # (V,) float32
    logit_options,  # LogitOptions
    ignore_index,
    V,
    ALIKE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    VEC: tl.constexpr,
    STAGES: tl.constexpr,
):
    """G from the cotangents of a row's numbers: one read and one write, without a sum."""
    i = tl.program_id(0)
    valid, column = target_column(target_ptr, i, ignore_index, V)
    row, head, groups = row_of(logits, i, V, VEC)
    groups_ptr = tl.multiple_of(row + head, 16)
    out_row, out_groups_ptr = out_of(grad_logits, i, head, ALIKE)
    if valid:
        logit_scale, softcap = number_at(logit_options.logit_scale), number_at(logit_options.softcap)
        edge, there = edges_of(head, groups, V, VEC)
        u_target = tl.load(row + column)
        u_edges = tl.load(row + edge, mask=there, other=0.0)
        lse2 = (tl.load(lse_ptr + i).to(tl.float64) + tl.load(lse_rest_ptr + i).to(tl.float64)) * 1.4426950408889634
        reference = lse2.to(tl.float32)
        factor = 0.0
        if cotangents.grad_lse is not None:
            share = tl.exp2((reference.to(tl.float64) - lse2).to(tl.float32))  # what rounding the reference takes
            factor = tl.load(cotangents.grad_lse + i).to(tl.float32) * logit_scale * share
        sum_factor = None
        if cotangents.grad_logit_sum is not None:
            sum_factor = tl.load(cotangents.grad_logit_sum + i).to(tl.float32) * logit_scale
        at_target = 0.0
        if cotangents.grad_target_logit is not None:
            at_target = tl.load(cotangents.grad_target_logit + i).to(tl.float32) * logit_scale
        full = groups // BLOCK_G
        for block in tl.range(0, full, num_stages=STAGES):
            words = load_block(groups_ptr, block, groups, BLOCK_G, False, "evict_first")
            store_gradient(
                out_groups_ptr, words, block, head, groups, reference, factor, sum_factor, class_weight_ptr, logit_options,
                logit_scale, softcap, BLOCK_G, VEC, False,
            )  # fmt: skip
        words = load_block(groups_ptr, full, groups, BLOCK_G, True, "evict_first")
        store_gradient(
            out_groups_ptr, words, full, head, groups, reference, factor, sum_factor, class_weight_ptr, logit_options,
            logit_scale, softcap, BLOCK_G, VEC, True,
        )  # fmt: skip
        finish_gradient(
            out_row, u_edges, edge, there, u_target, column, V, reference, factor, sum_factor, at_target,
            class_weight_ptr, logit_options, logit_scale, softcap,
        )  # fmt: skip
    else:
        store_zeros(out_row, out_groups_ptr, head, groups, V, BLOCK_G, VEC)
