"""Kernel of linear_cross_entropy_with_grad: the scalar loss and its gradients, from one pass over the logits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from flce_ops import meta
from flce_ops.aten.chunks import chunk_products, product_is_rounded, row_blocks
from flce_ops.aten.gradients import GradientAccumulator, rows_beside_gradients
from flce_ops.aten.kept_tokens import on_kept_tokens, zero_where_ignored
from flce_ops.aten.logits import (
    activate_with_slope,
    add_target_and_sum,
    apply_slope,
    at_columns,
    upcast,
    weighted_logits,
)
from flce_ops.aten.row_statistics import exponentiate_with_statistics, extra_matrices
from flce_ops.aten.sparse_gradients import (
    SparseAccumulator,
    draws_of,
    matrices_for_keeping,
    multiple_of,
    needs_exact,
    whole_tiles,
)
from flce_ops.math.loss import terms_of_tokens, weight_of_slots
from flce_ops.math.options import Operands, TokenStatistics
from flce_ops.math.shards import target_columns
from flce_ops.math.sparse_gradient import Draws
from flce_ops.math.two_sum import two_sum
from flce_ops.meta.arguments import LowRankWithGrad, WithGrad
from flce_ops.meta.call import takes
from flce_ops.support.readable import copy_bytes
from flce_ops.support.target_range import check_target_range

# N tokens, n rows of a chunk, D hidden, V vocabulary


@takes(WithGrad)
def with_grad(call: WithGrad) -> meta.Outputs:
    outputs = meta.outputs(call)
    check_target_range(call.operands.target, call.operands.linear_weight.shape[0], call.ignore_index)
    on_kept_tokens(with_grad_of_rows, call, outputs, call.fills, *draws_of(call))
    return outputs


def with_grad_of_rows(call: WithGrad, outputs: Sequence[Tensor], draws: Draws | None = None) -> None:
    loss, losses, *grads = outputs[:5]
    statistics = TokenStatistics.found(call.statistics, outputs[5:])
    input, linear_weight = call.operands[:2]
    beside = extra_matrices(call.statistics) + matrices_for_keeping(call)
    step = rows_of_chunk(
        call,
        call.operands,
        call.output_mask[1],
        reserved=copy_bytes(linear_weight),
        matrices_beside=beside,
        matrices=needs_exact(call),
    )
    step = whole_tiles(call, step)
    if draws is None:
        gradients = GradientAccumulator(input, linear_weight, grads, call.output_mask, step)
    else:
        gradients = SparseAccumulator(call, draws, grads, step)
    products = chunk_products(call, input, linear_weight, call.operands.linear_bias, step)
    loss.copy_(loss_and_gradients(call, call.operands, products, gradients, losses, statistics, call.target_weight))


def rows_of_chunk(
    call: WithGrad | LowRankWithGrad,
    operands: Operands,
    want_weight: bool,
    *,
    reserved: int,
    matrices_beside: int = 0,
    matrices: int = 0,  # of all rows
) -> int:
    in_block = product_is_rounded(operands.input) + (call.logits.softcap is not None) + matrices_beside
    classes = operands.linear_weight.shape[0]
    return rows_beside_gradients(
        operands.input, classes, want_weight, matrices=matrices, matrices_in_block=in_block, reserved=reserved
    )


class Accumulator(Protocol):
    """Where the G of chunks goes: a GradientAccumulator, or several."""

    def add_bias(self, grad_logits: Tensor) -> None: ...

    def round_block(self, block: Tensor, grad_logits: Tensor) -> None: ...

    def add_products(self, rows: slice, grad_logits: Tensor) -> None: ...

    def finish(self) -> None: ...


def loss_and_gradients(
    call: WithGrad | LowRankWithGrad,
    operands: Operands,
    products: Iterator[tuple[slice, Tensor]],  # rows of a chunk, and their u (n, V), which become G
    gradients: Accumulator,
    losses: Tensor,  # (N,) out
    statistics: TokenStatistics,  # (N,) each, out
    target_weight: Tensor | None = None,  # (N, K)
    scaled: Callable[[Tensor], Tensor] | None = None,  # makes u of a block of `products`
) -> Tensor:  # ()
    input, linear_weight, target, _, weight = operands
    num_classes = linear_weight.shape[0]
    accumulate, slot_weight = losses.dtype, None
    if target_weight is None:
        valid, column = target != call.ignore_index, zero_where_ignored(input, target).long().unsqueeze(1)
    else:
        valid, _, column = target_columns(target, call.ignore_index, 0, num_classes)
        slot_weight = weight_of_slots(target, target_weight, call.ignore_index, accumulate)
    scale = call.reduction.scale_of_tokens(valid, accumulate)
    class_weight = upcast(weight, accumulate)
    of_targets = column.squeeze(1) if slot_weight is None else column
    loss_of_tokens = terms_of_tokens(of_targets, class_weight, num_classes, call.loss, accumulate, slot_weight)
    for chunk, product in products:
        blocks = row_blocks(input, chunk, product, column, scale, losses, multiple=multiple_of(gradients))
        for rows, block, own_column, own_scale, own_losses in blocks:
            terms = loss_of_tokens.of(rows)
            logits, slope = activate_with_slope(block if scaled is None else scaled(block), call.logits)
            target_logit = at_columns(logits, own_column, target)
            logit_sum = weighted_logits(logits, class_weight) if call.loss.label_smoothing else None
            row_max, row_sum = exponentiate_with_statistics(logits, statistics, rows, num_classes)
            lse, lse_rest = two_sum(row_max, row_sum.log())
            own_losses.copy_(terms.loss(target_logit, lse, logit_sum, lse_rest))
            cotangents = terms.cotangents(target_logit, lse, own_scale)
            grad_logits = logits.mul_((cotangents.grad_lse / row_sum)[:, None])
            add_target_and_sum(grad_logits, own_column, cotangents, class_weight)
            gradients.add_bias(apply_slope(grad_logits, slope))
            if isinstance(gradients, SparseAccumulator):
                gradients.keep(grad_logits, cotangents.grad_lse, own_column, chunk, rows)
            gradients.round_block(block, grad_logits)
            del logits, grad_logits, slope  # before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    return call.reduction.loss(zero_where_ignored(input, losses), valid)
