"""The operators on given logits. Their kernel has one program per row. It reads the row from HBM once and writes its
gradient once.

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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ... import meta
from ...math.options import Cotangents
from ...math.token_weights_and_denominator import Reduction
from ...meta.arguments import Backward, Forward, WithGrad, WithGradInPlace
from ...meta.call import takes
from ...objectives.cross_entropy import CrossEntropy, RowNumbers
from ...objectives.in_triton import LN2
from ...support.path import record_run
from ...support.sizes import cdiv
from ...support.target_range import assert_in_range
from ..gemm.tiles import interpreted, multiprocessors
from ..kernel import Kernel, everywhere
from ..rows.after_chunks import LossSum, launch_after_chunks, scale_of_rows
from ..rows.gradient_factors import KnownRows
from ..rows.logit_numbers import loaded
from ..rows.row_numbers import RowOutputs
from ..rows.valid_tokens import Count, count_tokens
from ..steps.chunks import contiguous
from . import row_blocks as blocks

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
    valid, column = blocks.target_of(target_ptr, i, ignore_index, V)
    scores = blocks.Scores(logit_numbers, loaded(logit_numbers), class_weight_ptr)
    logit_scale = scores.numbers.logit_scale
    row = blocks.row_of(logits, i, V, VEC)
    groups_ptr = tl.multiple_of(row.pointer + row.head, 16)
    last = row.groups // BLOCK_G
    held = ()
    for block in tl.static_range(HELD):
        held += (blocks.load_block(groups_ptr, block, row.groups, valid, BLOCK_G, False, "evict_first"),)  # type: ignore[assignment]
    end = blocks.load_block(groups_ptr, last, row.groups, valid, BLOCK_G, True, "evict_first")
    edge, there = blocks.edges_of(row, VEC)
    # read first, because the gradient may overwrite the logits
    u_target = tl.load(row.pointer + column, mask=valid, other=0.0)
    u_edges = tl.load(row.pointer + edge, mask=there & everywhere(valid, there), other=0.0)

    if known.lse_pair is None:
        sums = blocks.nothing_added(BLOCK_G)
        for block in tl.static_range(HELD):
            u = blocks.numbers_in(held[block], DTYPE)
            sums = blocks.add_block(sums, u, block, row, scores, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False)
        for streamed in tl.range(HELD, tl.where(valid, last, HELD), num_stages=STAGES):
            words = blocks.load_block(groups_ptr, streamed, row.groups, valid, BLOCK_G, False, "evict_last")
            u = blocks.numbers_in(words, DTYPE)
            sums = blocks.add_block(sums, u, streamed, row, scores, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, False)
        sums = blocks.add_block(
            sums, blocks.numbers_in(end, DTYPE), last, row, scores, LOGIT_SUM, ARGMAX, BLOCK_G, VEC, True
        )
        of_row = blocks.whole_row(sums, u_edges, edge, there, V, scores, LOGIT_SUM, ARGMAX)
        row_max, row_sum, log2_sum, logit_sum, argmax = of_row
        row_max, row_sum = tl.where(valid, row_max, 0.0), tl.where(valid, row_sum, 1.0)
        log2_sum = tl.where(valid, log2_sum, 0.0)
        if ARGMAX:
            tl.store(results.argmax + i, tl.where(valid, argmax, -1).to(tl.int64))
        if results.max_logit is not None:
            tl.store(results.max_logit + i, row_max)
        target_logit, _ = blocks.logits_of(u_target, scores)
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
                counts, _ = blocks.target_of(target_ptr, coming, ignore_index, V)
                next_row = blocks.row_of(logits, coming, V, VEC)
                ahead = tl.minimum(next_row.groups, AHEAD * BLOCK_G)
                blocks.ask_for(next_row, tl.where(counts & (i + later < N), ahead, 0), BLOCK_G)
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
                share = blocks.exp_below(-tl.load(known.lse_pair + 2 * i + 1, mask=valid, other=0.0))
                factor = tl.load(known.grad_lse + i, mask=valid, other=0.0).to(tl.float32) * logit_scale * share
            if known.grad_logit_sum is not None:
                sum_factor = tl.load(known.grad_logit_sum + i, mask=valid, other=0.0).to(tl.float32) * logit_scale
            if known.grad_target_logit is not None:
                at_target = tl.load(known.grad_target_logit + i, mask=valid, other=0.0).to(tl.float32) * logit_scale
        slopes = blocks.Slopes(row_max, factor, sum_factor, at_target)
        out_row, out_groups_ptr = blocks.out_of(grad_logits, i, row, ALIKE)
        blocks.store_gradient(out_groups_ptr, blocks.as_loaded(end), last, row, slopes, scores, BLOCK_G, VEC, True)
        for back in tl.range(0, last - HELD, num_stages=STAGES):
            again = last - 1 - back
            words = blocks.load_block(groups_ptr, again, row.groups, valid, BLOCK_G, False, "evict_first")
            blocks.store_gradient(out_groups_ptr, words, again, row, slopes, scores, BLOCK_G, VEC, False)
        for block in tl.static_range(HELD):
            words = blocks.as_loaded(held[block])
            blocks.store_gradient(out_groups_ptr, words, block, row, slopes, scores, BLOCK_G, VEC, False)
        blocks.finish_gradient(out_row, u_edges, edge, there, u_target, column, V, slopes, scores)


class Tile(NamedTuple):
    """How a program reads its row."""

    num_warps: int
    block_g: int  # the size of a block, in groups of 16 bytes
    held: int = 0  # at most this many blocks stay in registers
    num_stages: int = 4  # loads in flight for blocks that are read twice, the current one included
    registers: int | None = None  # registers per thread
    programs: int = 1  # programs per multiprocessor runs at a time


# H200: bandwidth of the kernel relative to a copy's (4.2 to 4.3 TB/s). bfloat16 at V = 32000, 50304, 128256, 151936 |
# float32 at 32000, 50304, 128256. The number after + is with prefetched rows:
#   .79 + .94   .88 + .90   .76   .74 | .91   .81   .70    SHORT
#                           .78   .78 |             .74    LONG
#                                     | .86   .86          LONG_FLOAT32
#   .84         .83         .71   .70 | .80   .73   .67    nothing held, 16 warps, two programs per multiprocessor
#   .85         .85 + .86   .74       | .86   .78   .68    SHORT, but each program reads a row while it writes another
SHORT = Tile(8, 512, held=8, registers=128, programs=2)
LONG = Tile(16, 1024, held=8)
LONG_FLOAT32 = Tile(32, 1024, held=9, registers=64)
STREAMED = Tile(16, 1024)
INTERPRETED = Tile(1, 8, held=2)
SHORT_BYTES = 160 << 10
L2_BLOCKS = 8  # blocks of a row in the L2, to be read again or prefetched: 64 KiB a program, 17 MB in all


def tile_for(logits: Tensor, gradient: bool, softcap: bool) -> Tile:
    if interpreted(logits):
        tile = INTERPRETED
    elif not gradient or softcap:  # a softcap's slope takes the registers that would hold blocks
        tile = STREAMED
    elif logits.shape[1] * logits.element_size() <= SHORT_BYTES:
        tile = SHORT
    else:
        tile = LONG_FLOAT32 if logits.dtype == torch.float32 else LONG
    if not gradient or softcap:
        return tile._replace(held=0)
    vec = 16 // logits.element_size()
    full = max(0, logits.shape[1] - vec + 1) // vec // tile.block_g  # full blocks of a row, wherever the row begins
    return tile._replace(held=min(full, tile.held))


def blocks_ahead(logits: Tensor, tile: Tile) -> int:
    """Blocks of the next row to prefetch: those for which L2_BLOCKS has room."""
    if tile.programs == 1:
        return 0
    blocks = cdiv(logits.shape[1] * logits.element_size(), 16 * tile.block_g)
    return min(blocks, max(0, L2_BLOCKS - max(0, blocks - SHORT.held)))


@takes(Forward)
def launch_forward(call: Forward) -> meta.Outputs:
    outputs = meta.outputs(call)
    with launching(call) as in_range:
        count_tokens(call.operands.target, call.ignore_index, call.operands.input.shape[1], in_range)
        launch_rows(call, RowOutputs(**{r.name: out for r, out in zip(call.results, outputs) if out.numel()}))
    return outputs


@takes(WithGrad)
def launch_with_grad(call: WithGrad) -> meta.Outputs:
    loss, losses, grad_logits, _, _, argmax, *_ = outputs = meta.outputs(call)
    launch_loss(call, loss, losses, argmax, grad_logits)
    return outputs


@takes(WithGradInPlace)
def launch_with_grad_in_place(call: WithGradInPlace) -> meta.Outputs:
    outputs = meta.outputs(call)
    given = call.operands.input
    launch_loss(call, *outputs)
    if call.operands.input is not given:
        given.copy_(call.operands.input)
    return outputs


def launch_loss(
    call: WithGrad,
    loss: Tensor,  # () out
    losses: Tensor,  # (N,) out
    argmax: Tensor,  # (N,) out, or (0,)
    grad_logits: Tensor | None = None,  # (N, V) out; None: written over the logits
) -> None:
    weight, row_scale = call.operands.weight, call.reduction.row_scale
    if row_scale is not None:
        call.reduction = Reduction(row_scale.float().contiguous())
    weight_sum = None if weight is None else weight.float().sum()
    with launching(call) as in_range:
        logits, _, target, *_ = call.operands
        valid_tokens = count_tokens(target, call.ignore_index, logits.shape[1], in_range)
        objective = CrossEntropy(call.loss, num_classes=logits.shape[1], class_weight_sum=weight_sum)
        results = RowOutputs(losses=losses, argmax=argmax if call.statistics.argmax else None)
        of_loss: dict[str, Any] = {"objective": objective, "reduction": call.reduction, "valid_tokens": valid_tokens}
        launch_rows(call, results, logits if grad_logits is None else grad_logits, **of_loss)
        launch_after_chunks(valid_tokens.total, LossSum(losses, call.reduction, loss))


@takes(Backward)
def launch_backward(call: Backward) -> meta.Outputs:
    grad_logits, *_ = outputs = meta.outputs(call)
    with_unit_rows(call)
    call.cotangents = Cotangents(*contiguous(*call.cotangents))
    known = KnownRows(call.lse_pair.contiguous(), None, *call.cotangents)
    with torch.cuda.device_of(grad_logits):
        launch_rows(call, RowOutputs(), grad_logits, known=known)
    record_run(call, 1, grad_logits.shape[0])
    return outputs


def with_unit_rows(call: Forward | Backward | WithGrad) -> None:
    """Replaces the call's tensors, where necessary, by copies with rows of unit stride, contiguous vectors and float32
    class weights.
    """
    logits, _, target, _, weight = call.operands
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        logits = logits.contiguous()
        call.notes += ("a copy of logits without a unit stride",)
    target, weight = contiguous(target, None if weight is None else weight.float())
    call.operands = call.operands._replace(input=logits, target=target, weight=weight)


@contextmanager
def launching(call: Forward | WithGrad) -> Iterator[Tensor]:
    """A context for the launches of a call. Gives them a () bool for whether all targets are classes, and checks it."""
    with_unit_rows(call)
    logits, _, target, *_ = call.operands
    in_range = target.new_empty((), dtype=torch.bool)
    with torch.cuda.device_of(logits):
        yield in_range
        assert_in_range(in_range, target, logits.shape[1], call.ignore_index)
    record_run(call, 1, logits.shape[0])


def launch_rows(
    call: Forward | WithGrad | Backward,
    results: RowOutputs,
    grad_logits: Tensor | None = None,  # (N, V) out; None if only numbers of the rows are wanted
    *,
    known: KnownRows | None = None,  # if given, the arguments that follow are not
    objective: CrossEntropy | None = None,
    reduction: Reduction | None = None,
    valid_tokens: Count | None = None,
) -> None:
    logits, _, target, _, weight = call.operands
    tokens, num_classes = logits.shape
    tile = tile_for(logits, objective is not None, call.logits.softcap is not None)
    matrices = blocks.matrix_of(logits), None if grad_logits is None else blocks.matrix_of(grad_logits)
    numbers, d_sum = (None, None) if objective is None else (RowNumbers(*objective), objective.d_sum)
    rows_kernel[(tokens,)](
        *(*matrices, target, known or KnownRows(), reduction, valid_tokens, results, weight),
        *(numbers, d_sum, call.logits, call.ignore_index, tile.programs * multiprocessors(logits)),
        *(tokens, num_classes),
        OF_TARGET=None if objective is None else objective.of_target.jit,
        OF_ROW=None if objective is None else objective.of_row.jit,
        ALIKE=grad_logits is None or lie_alike(logits, grad_logits),
        BLOCK_G=tile.block_g,
        VEC=16 // logits.element_size(),
        HELD=tile.held,
        STAGES=tile.num_stages if weight is None else 1,  # staged class weights would take shared memory, too
        AHEAD=blocks_ahead(logits, tile),
        num_warps=tile.num_warps,
        maxnreg=tile.registers,
    )


def lie_alike(logits: Tensor, grad_logits: Tensor) -> bool:
    """Whether each row begins at the same distance from a multiple of 16 bytes in both matrices."""
    vec = 16 // logits.element_size()
    strides = logits.shape[0] < 2 or (logits.stride(0) - grad_logits.stride(0)) % vec == 0
    return strides and blocks.matrix_of(logits).shift == blocks.matrix_of(grad_logits).shift
