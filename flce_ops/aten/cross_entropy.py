"""The operators of cross-entropy and of token functions, of a head and of given logits.

forward      the numbers of each row that a loss needs
backward     makes the gradient of the logits from the cotangents of these numbers. It recomputes the logits that
             forward did not save, or reads given ones. For a head, two GEMMs follow.
with_grad    a scalar loss and its gradients in one pass over the logits. loss_and_gradients makes the G of a block: an
             objective (flce_ops/objectives) computes a row's loss and slopes, a GradientAccumulator receives G, and
             SharedRows exchanges row numbers if ranks share the vocabulary. `..._with_grad_` writes G over the logits.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.options import Statistics, TokenStatistics, beside_topk
from ..math.statistics import (
    Exchange,
    argmax_of_shards,
    class_weights_of_shards,
    log_shares,
    logit_sum_of_shards,
    lse_of_pair,
    shard_rows,
    shards_of_classes,
    statistics_of_shard,
    surprisal,
    target_columns,
)
from ..math.weights_and_denominator import Reduction
from ..meta.arguments import (
    Backward,
    BackwardInPlace,
    Forward,
    WithGrad,
    WithGradInPlace,
)
from ..objectives.cross_entropy import RowObjective, cross_entropy_of, topk_weights
from ..objectives.token_function import FunctionObjective, token_loss_named
from .chunks import (
    WHOLE_CHUNK,
    chunk_products,
    copied_rows,
    copy_bytes,
    kernel_of,
    product_is_rounded,
    rows_per_chunk,
    zero_where_ignored,
)
from .gradients import GradientAccumulator, products_and_gradients, run_blocks
from .logits import (
    BlockNumbers,
    add_target_and_sum,
    extra_matrices,
    reduce_rows,
    softmax_factors,
    softmax_gradient,
    upcast,
)

# N tokens, n rows of a chunk, D hidden, V vocabulary


@kernel_of(Forward, checks_target=True)
def forward(call: Forward, outputs: Sequence[Tensor]) -> None:
    input, linear_weight, _, linear_bias, _ = call.operands
    asked = Statistics(call.argmax, True, call.expected_log_prob, call.log_sum_sq_probs, call.mean_logit)
    if linear_weight is None:
        numbers_of_rows(call, outputs, copied_rows(call), asked)
        return
    num_classes, saved = linear_weight.shape[0], None
    in_block = product_is_rounded(input) + extra_matrices(asked)
    step = rows_per_chunk(input, num_classes, matrices_in_block=in_block, reserved=copy_bytes(linear_weight))
    if call.retain:
        saved = outputs[-1].view(input.dtype)
        saved[:, num_classes:].zero_()
        saved[input.shape[0] :].zero_()
    products = chunk_products(call, input, linear_weight, linear_bias, step, saved=saved)
    numbers_of_rows(call, outputs, products, asked)


def numbers_of_rows(
    call: Any,
    outputs: Sequence[Tensor],
    products: Iterable[tuple[slice, Tensor]],  # the rows of each chunk and their u, (n, V), which is overwritten
    asked: Statistics,
) -> None:
    made = {result.name: output for result, output in zip(call.results, outputs)}
    input, target, weight = call.operands[0], call.operands.target, upcast(call.operands.weight, made["lse_pair"].dtype)
    num_classes, start, whole = call.operands.num_classes, call.vocab_start, call.vocab_size
    if target.dim() == 2 or whole is not None or start:  # a shard, which lacks some classes
        _, hit, column = target_columns(target, call.ignore_index, start, num_classes)
    else:
        hit, column = None, zero_where_ignored(input, target).long().unsqueeze(1)
    weight_sum = (num_classes if weight is None else weight.sum()) if call.logit_sum else None

    def numbers(rows: slice, logits: Tensor, own_column: Tensor, own_target_logit: Tensor) -> None:
        at_target = logits.gather(1, own_column).view_as(own_target_logit)
        own_target_logit.copy_(at_target if hit is None else torch.where(hit[rows], at_target, 0.0))
        found = reduce_rows(logits, asked, call.num_classes, weight, weight_sum)
        for name, of_rows in (found._asdict() | {"lse_pair": found.lse_pair}).items():
            if of_rows is not None and name in made:
                made[name][rows] = of_rows

    run_blocks(call, products, numbers, column, made["target_logit"])


@kernel_of(BackwardInPlace)
def backward_in_place(call: BackwardInPlace, grads: Sequence[Tensor]) -> None:
    main_grad = call.main_grad.data  # with its own version counter: all chunks count as one write
    torch.autograd.graph.increment_version(call.main_grad)
    gradients_of_rows(call, (grads[0], main_grad, *grads[2:]))


@kernel_of(Backward)
def backward(call: Backward, grads: Sequence[Tensor]) -> None:
    gradients_of_rows(call, grads)


def gradients_of_rows(call: Backward, grads: Sequence[Tensor]) -> None:
    # p and its factor are separate matrices if the factor depends on the class
    in_block = int(call.grad_expected_log_prob is not None)
    retained = None if call.retained is None else call.retained.view(call.operands.input.dtype)
    products, gradients = products_and_gradients(call, grads, in_block, retained)
    operands = call.operands
    valid, hit, column = target_columns(operands.target, call.ignore_index, call.vocab_start, operands.num_classes)
    cotangents = call.cotangents.masked(hit, valid, call.lse_pair.dtype)
    factors = softmax_factors(call, valid, cotangents.grad_lse)
    weight = upcast(operands.weight, call.lse_pair.dtype)

    def gradient(rows: slice, logits: Tensor) -> Tensor | None:
        own = cotangents.of(rows)
        add_target_and_sum(softmax_gradient(logits, factors.of(rows)), column[rows], own, weight)
        return own.grad_lse

    run_blocks(call, products, gradient, gradients=gradients)


# N tokens, n rows of a chunk or of a block of one, D hidden, V vocabulary, v of them on this rank

NOTHING = TokenStatistics()


@kernel_of(WithGrad, checks_target=True)
def with_grad(call: WithGrad, outputs: Sequence[Tensor]) -> None:
    if call.group is not None:
        return with_grad_of_shard(call, outputs)
    loss, losses, *results, log_probs, of_scale = outputs
    grads, statistics = (*results[:3], of_scale), TokenStatistics.found(call.statistics, results[3:])
    products, gradients = products_and_gradients(call, grads, extra_matrices(call.statistics))
    if call.function is None:
        rows = rows_of_call(call, losses)
        loss.copy_(loss_and_gradients(call, products, gradients, *rows, statistics=statistics))
        return
    input, target = call.operands.input, call.operands.target
    tensors = tuple(zero_where_ignored(input, tensor) for tensor in call.tensors or ())
    valid, _, column = target_columns(target, call.ignore_index, 0, call.operands.num_classes)
    objective = FunctionObjective(token_loss_named(call.function), tensors, target != call.ignore_index)
    rows = None, objective, valid, column, losses
    loss.copy_(loss_and_gradients(call, products, gradients, *rows, log_probs=log_probs))


@kernel_of(WithGradInPlace, checks_target=True)
def with_grad_in_place(call: WithGradInPlace, outputs: Sequence[Tensor]) -> None:
    """The row of the k-th valid token is written at place k, which is never after the token's own place. So no row is
    overwritten before it is read.
    """
    loss, losses, argmax, grad_logits = outputs
    statistics = TokenStatistics(argmax if call.statistics.argmax else None)
    products, gradients = products_and_gradients(call, [grad_logits])
    loss.copy_(loss_and_gradients(call, products, gradients, *rows_of_call(call, losses), statistics=statistics))


def with_grad_of_shard(call: WithGrad, outputs: Sequence[Tensor]) -> None:
    """flce_ops/distributed/vocab_parallel.py says what it does.

    All ranks see the same targets, so they keep the same rows and meet in the same exchanges.
    """
    loss, losses, *grads, argmax = outputs[:6]
    target, weight = call.operands.target, call.operands.weight
    vocab_start, own = call.vocab_start, call.operands.num_classes
    valid, hit, column = target_columns(target, call.ignore_index, vocab_start, own)
    objective = cross_entropy_of(target, weight, call.vocab_size, call.loss, losses.dtype)
    own_weight = None if weight is None else weight[vocab_start : vocab_start + own].to(losses.dtype)
    of_shards = None
    if call.loss.label_smoothing:
        classes = shards_of_classes(slice(0, call.vocab_size), call.ranks)
        of_shards = class_weights_of_shards(weight, classes, losses)
    exchange = Exchange(call.group, call.ranks)
    own_statistics = statistics_of_shard(call.statistics, losses)
    largest = shard_rows(call.vocab_size, call.ranks)
    products, gradients = products_and_gradients(call, grads, extra_matrices(call.statistics), largest_shard=largest)
    shared = SharedRows(exchange, hit, vocab_start, argmax if call.statistics.argmax else None, of_shards)
    of_rows = (own_weight, objective, valid, column, losses)
    loss.copy_(loss_and_gradients(call, products, gradients, *of_rows, statistics=own_statistics, shared=shared))
    exchange.finish_statistics(call.statistics, own_statistics, valid, outputs[6:10])


class SharedRows(NamedTuple):
    """For rows whose classes are spread over ranks: combines this rank's numbers of a row with those of the other
    ranks.
    """

    exchange: Exchange
    hit: Tensor
    vocab_start: int
    argmax: Tensor | None  # out
    class_weights: Tensor | None  # (R,), their sum over each shard, for a logit sum

    def whole(
        self, rows: slice, numbers: BlockNumbers, target_logit: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns the lse_pair, the factor that turns E into probabilities, target_logit and logit_sum, all over whole
        rows.

        A share is a rank's part of the softmax's denominator. The shares of a row add up to 1, however log_sum is
        rounded.
        """
        row_max, log_sum, logit_sum = numbers.row_max, numbers.log_sum, numbers.logit_sum
        pair, share = numbers.lse_pair, torch.ones_like(row_max)
        target_logit = torch.where(self.hit[rows], target_logit, 0.0)
        largest: Any = None if self.argmax is None else (numbers.max_logit, numbers.argmax + self.vocab_start)
        if self.exchange.ranks > 1:
            sent = [row_max, log_sum, target_logit, *([] if logit_sum is None else [logit_sum])]
            sent += [] if largest is None else [part.to(row_max.dtype) for part in largest]
            gathered = self.exchange.gather(torch.stack(sent))
            pair, log_share = log_shares(gathered[:, 0], gathered[:, 1])
            if logit_sum is not None:
                logit_sum = logit_sum_of_shards(gathered[:, 3], log_share, self.class_weights)
            share = ((row_max - pair[:, 0]) + (log_sum - pair[:, 1])).exp() / log_share.exp().sum(0)
            target_logit = gathered[:, 2].sum(0)
            if largest is not None:
                largest = None, argmax_of_shards(gathered[:, -2], gathered[:, -1])
        if self.argmax is not None:
            self.argmax[rows] = largest[1]
        # a bias of -inf may switch off all classes of this rank
        factor = torch.where(numbers.row_sum > 0.0, share / numbers.row_sum, 0.0 * share)
        return pair, factor, target_logit, logit_sum


def fill_statistics(statistics: TokenStatistics, rows: slice, of_block: BlockNumbers) -> None:
    """Writes the numbers of a block into those statistics that are not None."""
    pair = of_block.lse_pair
    lse = pair if statistics.lse is not None and statistics.lse.dim() == 2 else lse_of_pair(pair)
    entropy = None if of_block.expected_log_prob is None else 0.0 - of_block.expected_log_prob
    found = (of_block.argmax, lse, entropy, of_block.log_sum_sq_probs, of_block.mean_logit)
    for of_tokens, of_rows in zip(statistics, found):
        if of_tokens is not None:
            of_tokens[rows] = of_rows


def rows_of_call(call: WithGrad, losses: Tensor) -> tuple[Any, ...]:
    """The class weights, the objective, the valid tokens, the targets' columns and the losses of a cross-entropy."""
    input, target, num_classes = call.operands[0], call.operands.target, call.operands.num_classes
    target_weight, topk_weight = call.target_weight, None
    if target_weight is None:
        valid, column = target != call.ignore_index, zero_where_ignored(input, target).long().unsqueeze(1)
    else:
        valid, _, column = target_columns(target, call.ignore_index, 0, num_classes)
        topk_weight = topk_weights(target, target_weight, call.ignore_index, losses.dtype)
    class_weight = upcast(call.operands.weight, losses.dtype)
    of_targets = column.squeeze(1) if topk_weight is None else column
    objective = cross_entropy_of(of_targets, class_weight, num_classes, call.loss, losses.dtype, topk_weight)
    return class_weight, objective, valid, column, losses


def loss_and_gradients(
    call: Any,
    products: Iterable[tuple[slice, Tensor]],  # as of run_blocks
    gradients: GradientAccumulator,
    class_weight: Tensor | None,  # (V,)
    objective: RowObjective,
    valid: Tensor,  # (N,)
    column: Tensor,  # (N, 1) or (N, K)
    losses: Tensor,  # (N,) out, as are the statistics and log_probs
    *,
    statistics: TokenStatistics = NOTHING,
    log_probs: Tensor | None = None,  # (N,) or (N, K), of a token function
    shared: SharedRows | None = None,
) -> Tensor:  # ()
    reduction = call.reduction
    if reduction.row_scale is None:  # then the tokens are counted here, once
        reduction = Reduction(None, reduction.divisor(valid, losses.dtype))
    asked, weight_sum = Statistics(*(of_rows is not None for of_rows in statistics)), None
    if shared is not None:
        asked = asked._replace(argmax=shared.argmax is not None)
    if objective.d_sum is not None:
        weight_sum = call.operands.num_classes if class_weight is None else class_weight.sum()

    def gradient(
        rows: slice, logits: Tensor, own_column: Tensor, own_valid: Tensor, own_scale: Tensor, own_losses: Tensor
    ) -> Tensor:
        found = logits.gather(1, own_column)
        target_logit = found if objective.soft else found.squeeze(1)
        numbers = reduce_rows(logits, asked, objective.num_classes, class_weight, weight_sum)
        if any(asked):
            fill_statistics(statistics, rows, numbers)
        pair, logit_sum = numbers.lse_pair, numbers.logit_sum
        if shared is not None:
            pair, normalizer, target_logit, logit_sum = shared.whole(rows, numbers, target_logit)
        own, distance = objective.of(rows), surprisal(target_logit, pair)
        distance = torch.where(beside_topk(own_valid, distance), distance, 0.0)  # ignored rows may have inf
        if log_probs is not None:
            log_probs[rows] = torch.where(own.weight, -distance, 0.0)
        found, slopes = own.losses_and_slopes(distance, lse_of_pair(pair), logit_sum)
        own_losses.copy_(found)
        cotangents = own.cotangents(slopes, own_scale)
        factor = cotangents.grad_lse / numbers.row_sum if shared is None else cotangents.grad_lse * normalizer
        logits.mul_(factor[:, None])
        if shared is not None:
            own_target = torch.where(shared.hit[rows], cotangents.grad_target_logit, 0.0)
            cotangents = cotangents._replace(grad_target_logit=own_target)
        add_target_and_sum(logits, own_column, cotangents, class_weight)
        return cotangents.grad_lse

    of_rows = (column, valid, reduction.scale_of_tokens(valid, losses.dtype), losses)
    nbytes = None if shared is None else WHOLE_CHUNK  # one exchange a chunk
    run_blocks(call, products, gradient, *of_rows, gradients=gradients, nbytes=nbytes)
    return reduction.loss(zero_where_ignored(call.operands[0], losses), valid)
