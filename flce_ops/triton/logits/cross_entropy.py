"""The CUDA implementations of the operators on given logits: how a row is tiled, and the launches of its kernel
(given_rows.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import meta
from ...math.options import Cotangents, LogitOperands
from ...math.reduction import Reduction
from ...meta.arguments import LogitsBackward, LogitsForward, LogitsWithGrad, LogitsWithGradInPlace
from ...meta.call import takes
from ...objectives.cross_entropy import CrossEntropy
from ...objectives.row import RowNumbers
from ...support.integers import cdiv
from ...support.path import record_run
from ...support.target_range import assert_in_range
from ..gemm.device import interpreted, multiprocessors
from ..rows.after_chunks import LossSum, launch_after_chunks
from ..rows.gradient_factors import KnownRows
from ..rows.row_numbers import RowOutputs
from ..rows.valid_tokens import Count, count_tokens
from ..steps.chunks import contiguous
from .given_rows import rows_kernel
from .row_blocks import matrix_of

# N tokens, V vocabulary


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


@takes(LogitsForward)
def launch_forward(call: LogitsForward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = meta.outputs(call)
    with launching(call) as in_range:
        count_tokens(call.operands.target, call.ignore_index, call.operands.logits.shape[1], in_range)
        launch_rows(call, RowOutputs(**{r.name: out for r, out in zip(call.results, outputs) if out.numel()}))
    return outputs


@takes(LogitsWithGrad)
def launch_with_grad(call: LogitsWithGrad) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, losses, grad_logits, argmax = outputs = meta.outputs(call)
    launch_loss(call, loss, losses, argmax, grad_logits)
    return outputs


@takes(LogitsWithGradInPlace)
def launch_with_grad_in_place(call: LogitsWithGradInPlace) -> tuple[Tensor, Tensor, Tensor]:
    outputs = meta.outputs(call)
    given = call.operands.logits
    launch_loss(call, *outputs)
    if call.operands.logits is not given:
        given.copy_(call.operands.logits)
    return outputs


def launch_loss(
    call: LogitsWithGrad,
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
        logits, target, _ = call.operands
        valid_tokens = count_tokens(target, call.ignore_index, logits.shape[1], in_range)
        objective = CrossEntropy(call.loss, num_classes=logits.shape[1], class_weight_sum=weight_sum)
        results = RowOutputs(losses=losses, argmax=argmax if call.argmax else None)
        of_loss: dict[str, Any] = {"objective": objective, "reduction": call.reduction, "valid_tokens": valid_tokens}
        launch_rows(call, results, logits if grad_logits is None else grad_logits, **of_loss)
        launch_after_chunks(valid_tokens.total, LossSum(losses, call.reduction, loss))


@takes(LogitsBackward)
def launch_backward(call: LogitsBackward) -> Tensor:
    grad_logits = meta.outputs(call)
    with_unit_rows(call)
    call.cotangents = Cotangents(*contiguous(*call.cotangents))
    known = KnownRows(call.lse_pair.contiguous(), None, *call.cotangents)
    with torch.cuda.device_of(grad_logits):
        launch_rows(call, RowOutputs(), grad_logits, known=known)
    record_run(call, 1, grad_logits.shape[0])
    return grad_logits


def with_unit_rows(call: LogitsForward | LogitsBackward | LogitsWithGrad) -> None:
    """Replaces the call's tensors, where necessary, by copies with rows of unit stride, contiguous vectors and float32
    class weights.
    """
    logits, target, weight = call.operands
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        logits = logits.contiguous()
        call.notes += ("a copy of logits without a unit stride",)
    target, weight = contiguous(target, None if weight is None else weight.float())
    call.operands = LogitOperands(logits, target, weight)


@contextmanager
def launching(call: LogitsForward | LogitsWithGrad) -> Iterator[Tensor]:
    """A context for the launches of a call. Gives them a () bool for whether all targets are classes, and checks it."""
    with_unit_rows(call)
    logits, target, _ = call.operands
    in_range = target.new_empty((), dtype=torch.bool)
    with torch.cuda.device_of(logits):
        yield in_range
        assert_in_range(in_range, target, logits.shape[1], call.ignore_index)
    record_run(call, 1, logits.shape[0])


def launch_rows(
    call: LogitsForward | LogitsWithGrad | LogitsBackward,
    results: RowOutputs,
    grad_logits: Tensor | None = None,  # (N, V) out; None if only numbers of the rows are wanted
    *,
    known: KnownRows | None = None,  # if given, the arguments that follow are not
    objective: CrossEntropy | None = None,
    reduction: Reduction | None = None,
    valid_tokens: Count | None = None,
) -> None:
    logits, target, weight = call.operands
    tokens, num_classes = logits.shape
    tile = tile_for(logits, objective is not None, call.logits.softcap is not None)
    rows_kernel[(tokens,)](
        matrix_of(logits),
        None if grad_logits is None else matrix_of(grad_logits),
        target,
        known or KnownRows(),
        reduction,
        valid_tokens,
        results,
        weight,
        None if objective is None else RowNumbers(*objective),
        None if objective is None else objective.d_sum,
        call.logits,
        call.ignore_index,
        tile.programs * multiprocessors(logits),
        tokens,
        num_classes,
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
    return strides and matrix_of(logits).shift == matrix_of(grad_logits).shift
