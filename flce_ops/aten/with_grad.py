"""The operators that make a scalar loss and its gradients in one pass over the logits.

loss_and_gradients loops over chunks and blocks of rows. An objective (flce_ops/objectives) computes a row's loss and
slopes, an Accumulator receives G, and SharedRows exchanges row numbers if ranks share the vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.options import LogitOperands, Operands, Statistics, TokenStatistics
from ..math.reduction import Reduction
from ..math.shards import (
    Exchange,
    argmax_of_shards,
    class_weights_of_shards,
    log_shares,
    logit_sum_of_shards,
    shard_rows,
    shards_of_classes,
    statistics_of_shard,
    target_columns,
)
from ..math.sparse_gradient import Draws
from ..math.statistics import surprisal, two_sum
from ..math.topk import beside_topk
from ..meta.arguments import LogitsWithGrad, TokenLossWithGrad, VocabParallelWithGrad, WithGrad
from ..objectives.cross_entropy import cross_entropy_of, topk_weights
from ..objectives.row import RowObjective
from ..objectives.token_losses import token_loss_named
from ..objectives.token_objective import FunctionObjective
from .chunks import block_bytes, chunk_products, copy_bytes, product_is_rounded, row_blocks
from .gradients import Accumulator, SparseAccumulator, accumulator_of, draws_of, needs_exact, rows_beside_gradients
from .logits import activate_with_slope, add_target_and_sum, apply_slope, upcast
from .row_statistics import BlockNumbers, extra_matrices, reduce_rows
from .valid_tokens import kernel_of, zero_where_ignored

# N tokens, n rows of a chunk or of a block of one, D hidden, V vocabulary, v of them on this rank

NONE_ASKED = Statistics()


@kernel_of(WithGrad, checks_target=True, extra_of=draws_of)
def with_grad(call: WithGrad, outputs: Sequence[Tensor], draws: Draws | None = None) -> None:
    loss, losses, *results, of_scale = outputs
    grads, statistics = (*results[:3], of_scale), TokenStatistics.found(call.statistics, results[3:])
    input, linear_weight = call.operands[:2]
    step = rows_of_chunk(call, call.statistics, draws)
    gradients = accumulator_of(call, draws, grads, step)
    products = chunk_products(call, input, linear_weight, call.operands.linear_bias, step)
    of_tokens = rows_of_call(call, losses, statistics, call.target_weight)
    loss.copy_(loss_and_gradients(call, of_tokens, products, gradients))


@kernel_of(TokenLossWithGrad, checks_target=True)
def token_loss_with_grad(call: TokenLossWithGrad, outputs: Sequence[Tensor]) -> None:
    loss, losses, *grads, log_probs, of_scale = outputs
    grads.append(of_scale)
    input, linear_weight, target, linear_bias = call.operands
    step = rows_of_chunk(call)
    gradients = accumulator_of(call, None, grads, step)
    products = chunk_products(call, input, linear_weight, linear_bias, step)
    tensors = tuple(zero_where_ignored(input, tensor) for tensor in call.tensors)
    valid, _, column = target_columns(target, call.ignore_index, 0, linear_weight.shape[0])
    objective = FunctionObjective(token_loss_named(call.function), tensors, target != call.ignore_index)
    of_tokens = RowsOfTokens(input, objective, valid, column, call.reduction, losses, log_probs=log_probs)
    loss.copy_(loss_and_gradients(call, of_tokens, products, gradients))


@kernel_of(VocabParallelWithGrad, checks_target=True)
def vocab_parallel_with_grad(call: VocabParallelWithGrad, outputs: Sequence[Tensor]) -> None:
    """flce_ops/distributed/vocab_parallel.py says what it does.

    All ranks see the same targets, so they keep the same rows and meet in the same exchanges.
    """
    loss, losses, *grads, argmax, _, _, _, _ = outputs
    input, linear_weight, target, linear_bias, weight = call.operands
    vocab_start, own, largest_shard = call.vocab_start, linear_weight.shape[0], shard_rows(call.vocab_size, call.ranks)
    valid, hit, column = target_columns(target, call.ignore_index, vocab_start, own)
    objective = cross_entropy_of(target, weight, call.vocab_size, call.loss, losses.dtype)
    own_weight = None if weight is None else weight[vocab_start : vocab_start + own].to(losses.dtype)
    of_shards = None
    if call.loss.label_smoothing:
        of_shards = class_weights_of_shards(weight, shards_of_classes(slice(0, call.vocab_size), call.ranks), losses)
    exchange = Exchange(call.group, call.ranks)
    own_statistics = statistics_of_shard(call.statistics, losses)
    lse_rest = None if own_statistics.lse is None else torch.empty_like(losses)
    matrices = product_is_rounded(input) + (call.logits.softcap is not None) + extra_matrices(call.statistics)
    step = rows_beside_gradients(input, largest_shard, call.output_mask[1], matrices=matrices)
    gradients = accumulator_of(call, None, grads, step)
    products = chunk_products(call, input, linear_weight, linear_bias, step)
    shared = SharedRows(exchange, hit, vocab_start, argmax if call.statistics.argmax else None, lse_rest, of_shards)
    rows = (input, objective, valid, column, Reduction(call.row_scale), losses, own_statistics)
    of_tokens = RowsOfTokens(*rows, class_weight=own_weight, num_classes=call.vocab_size, shared=shared)
    loss.copy_(loss_and_gradients(call, of_tokens, products, gradients))
    exchange.finish_statistics(call.statistics, own_statistics, valid, outputs[6:], lse_rest)


def rows_of_chunk(call: Any, statistics: Statistics = NONE_ASKED, draws: Draws | None = None) -> int:
    input, linear_weight = call.operands[:2]
    in_block = product_is_rounded(input) + (call.logits.softcap is not None) + extra_matrices(statistics)
    in_block += 2 * call.scale_gradient  # u, and G u
    return rows_beside_gradients(
        input,
        linear_weight.shape[0],
        call.output_mask[1],
        matrices=draws is not None and needs_exact(call),
        matrices_in_block=in_block + (draws is not None),
        reserved=copy_bytes(linear_weight),
    )


class SharedRows:
    """For rows whose classes are spread over ranks: combines this rank's numbers of a row with those of the other
    ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        hit: Tensor,
        vocab_start: int,
        argmax: Tensor | None,  # out
        lse_rest: Tensor | None,  # out: what the rounding of this rank's lse took from it
        class_weights: Tensor | None,  # (R,), their sum over each shard, for a logit sum
    ) -> None:
        self.exchange, self.hit, self.vocab_start = exchange, hit, vocab_start
        self.argmax, self.lse_rest, self.class_weights = argmax, lse_rest, class_weights

    def whole(
        self, rows: slice, numbers: BlockNumbers, own_lse: Tensor, own_rest: Tensor, target_logit: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Returns lse, its rest, the factor that turns E into probabilities, target_logit and logit_sum, all over whole
        rows.

        A share is a rank's part of the softmax's denominator. The shares of a row add up to 1, however lse is rounded.
        """
        lse, rest, share, logit_sum = own_lse, own_rest, torch.ones_like(own_lse), numbers.logit_sum
        target_logit = torch.where(self.hit[rows], target_logit, 0.0)
        largest: Any = None if self.argmax is None else (numbers.max_logit, numbers.argmax + self.vocab_start)
        if self.exchange.ranks > 1:
            sent = [lse, rest, target_logit, *([] if logit_sum is None else [logit_sum])]
            sent += [] if largest is None else [part.to(lse.dtype) for part in largest]
            gathered = self.exchange.gather(torch.stack(sent))
            lse, rest, log_share = log_shares(gathered[:, 0], gathered[:, 1])
            if logit_sum is not None:
                logit_sum = logit_sum_of_shards(gathered[:, 3], log_share, self.class_weights)
            share = ((own_lse - lse) + (own_rest - rest)).exp() / log_share.exp().sum(0)
            target_logit = gathered[:, 2].sum(0)
            if largest is not None:
                largest = None, argmax_of_shards(gathered[:, -2], gathered[:, -1])
        if self.argmax is not None:
            self.argmax[rows] = largest[1]
        if self.lse_rest is not None:
            self.lse_rest[rows] = own_rest
        # a bias of -inf may switch off all classes of this rank
        factor = torch.where(numbers.row_sum > 0.0, share / numbers.row_sum, 0.0 * share)
        return lse, rest, factor, target_logit, logit_sum


def fill_statistics(statistics: TokenStatistics, rows: slice, of_block: BlockNumbers) -> None:
    """Writes the numbers of a block into those statistics that are not None."""
    lse = of_block.row_max + of_block.log_sum
    entropy = None if of_block.moment is None else of_block.log_sum - of_block.moment
    found = (of_block.argmax, lse, entropy, of_block.log_sum_sq_probs, of_block.mean_logit)
    for of_tokens, of_rows in zip(statistics, found):
        if of_tokens is not None:
            of_tokens[rows] = of_rows


class RowsOfTokens(NamedTuple):
    """Inputs and outputs of N tokens, (N,) each unless noted."""

    input: Tensor  # (N, D), or given logits (N, V)
    objective: RowObjective
    valid: Tensor
    column: Tensor  # (N, 1) or (N, K)
    reduction: Reduction
    losses: Tensor  # out, as are the next two
    statistics: TokenStatistics = TokenStatistics()
    log_probs: Tensor | None = None  # (N,) or (N, K), of a token function
    class_weight: Tensor | None = None  # (V,)
    num_classes: int = 0
    shared: SharedRows | None = None


def rows_of_call(
    call: WithGrad | LogitsWithGrad,
    losses: Tensor,
    statistics: TokenStatistics,
    target_weight: Tensor | None = None,  # (N, K)
) -> RowsOfTokens:
    """The rows of a cross-entropy call."""
    operands: Operands | LogitOperands = call.operands
    input, target, num_classes, topk_weight = operands[0], operands.target, operands.num_classes, None
    if target_weight is None:
        valid, column = target != call.ignore_index, zero_where_ignored(input, target).long().unsqueeze(1)
    else:
        valid, _, column = target_columns(target, call.ignore_index, 0, num_classes)
        topk_weight = topk_weights(target, target_weight, call.ignore_index, losses.dtype)
    class_weight = upcast(operands.weight, losses.dtype)
    of_targets = column.squeeze(1) if topk_weight is None else column
    objective = cross_entropy_of(of_targets, class_weight, num_classes, call.loss, losses.dtype, topk_weight)
    rows = (input, objective, valid, column, call.reduction, losses, statistics)
    return RowsOfTokens(*rows, class_weight=class_weight, num_classes=num_classes)


def loss_and_gradients(
    call: Any,
    of_tokens: RowsOfTokens,
    products: Iterator[tuple[slice, Tensor]],  # the rows of each chunk and their u (n, V), which is overwritten with G
    gradients: Accumulator,
) -> Tensor:  # ()
    input, objective, valid, column, reduction, losses, statistics, log_probs, *_ = of_tokens
    class_weight, num_classes, shared = of_tokens[-3:]
    if reduction.row_scale is None:  # then the tokens are counted here, once
        reduction = Reduction(None, reduction.divisor(valid, losses.dtype))
    scale = reduction.scale_of_tokens(valid, losses.dtype)
    nbytes = block_bytes(input)
    asked, weight_sum = Statistics(*(of_rows is not None for of_rows in statistics)), None
    if shared is not None:
        asked = asked._replace(argmax=shared.argmax is not None)
    for chunk, product in products:
        if weight_sum is None and objective.d_sum is not None:
            weight_sum = product.shape[1] if class_weight is None else class_weight.sum()
        # if ranks share the vocabulary, a chunk is one block: one exchange a chunk
        of_rows = (column, valid, scale, losses)
        if shared:
            blocks: list[tuple] = [(chunk, product, *(vector[chunk] for vector in of_rows))]
        else:
            blocks = row_blocks(input, chunk, product, nbytes, *of_rows)
        for rows, block, own_column, own_valid, own_scale, own_losses in blocks:
            product_of_rows = gradients.kept(block)
            logits, slope = activate_with_slope(block, call.logits)
            found = logits.gather(1, own_column)
            target_logit = found if objective.soft else found.squeeze(1)
            numbers = reduce_rows(logits, asked, num_classes, class_weight, weight_sum)
            row_sum, logit_sum = numbers.row_sum, numbers.logit_sum
            if any(asked):
                fill_statistics(statistics, rows, numbers)
            lse, lse_rest = two_sum(numbers.row_max, numbers.log_sum)
            if shared is not None:
                lse, lse_rest, normalizer, target_logit, logit_sum = shared.whole(
                    rows, numbers, lse, lse_rest, target_logit
                )
            own, distance = objective.of(rows), surprisal(target_logit, lse, lse_rest)
            distance = torch.where(beside_topk(own_valid, distance), distance, 0.0)  # ignored rows may have inf
            if log_probs is not None:
                log_probs[rows] = torch.where(own.weight, -distance, 0.0)
            found, slopes = own.losses_and_slopes(distance, lse, logit_sum)
            own_losses.copy_(found)
            cotangents = own.cotangents(slopes, own_scale)
            factor = cotangents.grad_lse / row_sum if shared is None else cotangents.grad_lse * normalizer
            grad_logits = logits.mul_(factor[:, None])
            if shared:
                own_target = torch.where(shared.hit[rows], cotangents.grad_target_logit, 0.0)
                cotangents = cotangents._replace(grad_target_logit=own_target)
            add_target_and_sum(grad_logits, own_column, cotangents, class_weight)
            gradients.add_bias(apply_slope(grad_logits, slope))
            gradients.add_scale(grad_logits, product_of_rows)
            if isinstance(gradients, SparseAccumulator):
                gradients.keep(grad_logits, cotangents.grad_lse, chunk, rows)
            gradients.round_block(block, grad_logits)
            del logits, grad_logits, slope  # frees memory before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    return reduction.loss(zero_where_ignored(input, losses), valid)
