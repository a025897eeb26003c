"""The operators of cross-entropy and of token functions, of a head and of given logits.

forward      the numbers of each row that a loss needs
backward     makes the gradient of the logits from the cotangents of these numbers. It recomputes the logits that
             forward did not save, or reads given ones. For a head, two GEMMs follow.
with_grad    a scalar loss and its gradients in one pass over the logits. For the G of a block an objective
             (flce_ops/objectives) computes a row's loss and slopes, a GradientAccumulator receives G, and SharedRows
             exchanges row numbers if ranks share the vocabulary. `..._with_grad_` writes G over the logits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.options import Statistics, TokenStatistics
from ..math.statistics import (
    Exchange,
    argmax_of_shards,
    class_weights_of_shards,
    log_shares,
    logit_sum_of_shards,
    lse_of_pair,
    shards_of_classes,
    statistics_of_shard,
    target_columns,
)
from ..meta.arguments import (
    Backward,
    BackwardInPlace,
    Forward,
    WithGrad,
    WithGradInPlace,
)
from ..objectives.cross_entropy import cross_entropy_of
from ..objectives.token_function import FunctionObjective, token_loss_named
from ..support.workspace import matrix_bytes
from .chunks import (
    WHOLE_CHUNK,
    block_bytes,
    chunk_products,
    copied_rows,
    copy_bytes,
    kernel_of,
    product_is_rounded,
    rows_per_chunk,
    tokens_of,
    zero_where_ignored,
)
from .gradients import logit_blocks, products_and_gradients
from .logits import (
    BlockNumbers,
    add_target_and_sum,
    reduce_rows,
    softmax_factors,
    softmax_gradient,
    upcast,
)

# N tokens, n rows of a chunk, D hidden, V vocabulary


@kernel_of(Forward, checks_target=True)
def forward(call: Forward, outputs: Sequence[Tensor]) -> None:
    made = {result.name: output for result, output in zip(call.results, outputs)}
    (input, linear_weight, target, _, weight), num_classes = call.operands, call.operands.num_classes
    asked = Statistics(call.argmax, True, call.expected_log_prob, call.log_sum_sq_probs, call.mean_logit)
    nbytes = matrix_bytes(tokens_of(input))
    if linear_weight is None:
        products = copied_rows(call, nbytes)
    else:
        in_block = product_is_rounded(input) + (asked.entropy or asked.log_sum_sq_probs)  # z - row_max, or E^2
        reserved = copy_bytes(linear_weight)
        step = rows_per_chunk(input, nbytes, num_classes, matrices_in_block=in_block, reserved=reserved)
        saved = None
        if call.retain:
            saved = outputs[-1].view(input.dtype)
            saved[:, num_classes:].zero_()
            saved[input.shape[0] :].zero_()
        products = chunk_products(call, step, saved=saved)
    hit, weight = None, upcast(weight, made["lse_pair"].dtype)
    if target.dim() == 2 or call.vocab_size is not None or call.vocab_start:  # a shard, which lacks some classes
        _, hit, column = target_columns(target, call.ignore_index, call.vocab_start, num_classes)
    else:
        column = zero_where_ignored(input, target).long().unsqueeze(1)
    weight_sum = (num_classes if weight is None else weight.sum()) if call.logit_sum else None
    of_block, vectors = block_bytes(input, nbytes), (column, made["target_logit"])
    for chunk, product in products:
        for rows, logits, own_column, own_target_logit in logit_blocks(call, chunk, product, of_block, *vectors):
            at_target = logits.gather(1, own_column).view_as(own_target_logit)
            own_target_logit.copy_(at_target if hit is None else torch.where(hit[rows], at_target, 0.0))
            found = reduce_rows(logits, asked, call.num_classes, weight, weight_sum)
            del logits  # frees memory before the next block is allocated
            for name, of_rows in (found._asdict() | {"lse_pair": found.lse_pair}).items():
                if of_rows is not None and name in made:
                    made[name][rows] = of_rows


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
    nbytes = matrix_bytes(tokens_of(call.operands.input))
    products, gradients = products_and_gradients(call, grads, nbytes, in_block, retained)
    operands = call.operands
    valid, hit, column = target_columns(operands.target, call.ignore_index, call.vocab_start, operands.num_classes)
    cotangents = call.cotangents.masked(hit, valid, call.lse_pair.dtype)
    factors = softmax_factors(call, valid, cotangents.grad_lse)
    weight = upcast(operands.weight, call.lse_pair.dtype)

    of_block = block_bytes(operands.input, nbytes)
    for chunk, product in products:
        for rows, logits in gradients.blocks(chunk, product, of_block):
            own = cotangents.of(rows)
            add_target_and_sum(softmax_gradient(logits, factors.of(rows)), column[rows], own, weight)
            gradients.grad_lse = own.grad_lse
            del logits  # frees memory before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()


def loss_and_gradients(call: WithGrad, outputs: Sequence[Tensor]) -> None:
    """If ranks share the vocabulary, all see the same targets, so they keep the same rows and meet in the same
    exchanges. flce_ops/distributed/vocab_parallel.py says what they exchange.
    """
    loss, losses, *results, log_probs, of_scale = outputs
    asked, statistics, shared = call.statistics, TokenStatistics.found(call.statistics, results[3:]), None
    if call.function is not None:
        class_weight, objective, valid, column = rows_of_function(call)
    elif call.group is None:
        class_weight, objective, valid, column = rows_of_call(call, losses.dtype)
    else:
        class_weight, objective, valid, column, shared = rows_of_shard(call, losses, statistics.argmax)
        statistics = statistics_of_shard(asked, losses)
    grads = results[:3] if shared is not None else [*results[:3], of_scale]
    nbytes = matrix_bytes(tokens_of(call.operands.input))
    in_block = asked.entropy or asked.log_sum_sq_probs  # z - row_max, or E^2
    products, gradients = products_and_gradients(call, grads, nbytes, int(in_block))
    scale, denominator = call.reduction.scale_of_tokens(valid, losses.dtype)
    soft, weight_sum = objective.soft, None
    if objective.d_sum is not None:
        weight_sum = call.operands.num_classes if class_weight is None else class_weight.sum()
    # with one exchange a chunk
    of_block = block_bytes(call.operands.input, nbytes) if shared is None else WHOLE_CHUNK
    vectors = column, valid, scale, losses
    for chunk, product in products:
        for rows, logits, own_column, own_valid, own_scale, own_losses in gradients.blocks(
            chunk, product, of_block, *vectors
        ):
            target_logit = logits.gather(1, own_column) if soft else logits.gather(1, own_column).squeeze(1)
            numbers = reduce_rows(logits, asked, objective.num_classes, class_weight, weight_sum)
            reference, log_sum, logit_sum = numbers.row_max, numbers.log_sum, numbers.logit_sum
            if any(asked):
                fill_statistics(statistics, rows, numbers)
            if shared is not None:
                reference, log_sum, normalizer, target_logit, logit_sum = shared.whole(rows, numbers, target_logit)
            lse = reference + log_sum
            if soft:
                own_valid, reference, log_sum = (of_row.unsqueeze(1) for of_row in (own_valid, reference, log_sum))
            # the surprisal; rounding of log_sum can make it negative, and ignored rows may have inf
            distance = ((reference - target_logit) + log_sum).clamp_(min=0.0).where(own_valid, 0.0)
            own = objective.of(rows)
            if log_probs.numel():
                log_probs[rows] = torch.where(own.weight, -distance, 0.0)
            found, slopes = own.losses_and_slopes(distance, lse, logit_sum)
            own_losses.copy_(found)
            cotangents = own.cotangents(slopes, own_scale)
            gradients.grad_lse = grad_lse = cotangents.grad_lse
            logits.mul_((grad_lse / numbers.row_sum if shared is None else grad_lse * normalizer)[:, None])
            if shared is not None:
                own_target = torch.where(shared.hit[rows], cotangents.grad_target_logit, 0.0)
                cotangents = cotangents._replace(grad_target_logit=own_target)
            add_target_and_sum(logits, own_column, cotangents, class_weight)
            del logits  # frees memory before the next block is allocated
        gradients.add_products(chunk, product)
    gradients.finish()
    counted = zero_where_ignored(call.operands.input, losses)
    loss.copy_((call.reduction.row_scale * counted).sum() if denominator is None else counted.sum() / denominator)
    if shared is not None:
        shared.exchange.finish_statistics(asked, statistics, valid, results[4:])


with_grad = kernel_of(WithGrad, checks_target=True)(loss_and_gradients)


@kernel_of(WithGradInPlace, checks_target=True)
def with_grad_in_place(call: WithGradInPlace, outputs: Sequence[Tensor]) -> None:
    """The row of the k-th valid token is written at place k, which is never after the token's own place. So no row is
    overwritten before it is read.
    """
    loss, losses, argmax, grad_logits = outputs
    none = losses[:0]
    loss_and_gradients(call, (loss, losses, grad_logits, none, none, argmax, *[none] * 6))


def rows_of_call(call: WithGrad, dtype: torch.dtype) -> tuple[Any, ...]:
    """The class weights, the objective, the valid tokens, and the targets' columns of a cross-entropy."""
    operands = call.operands
    if call.target_weight is None:
        valid = operands.target != call.ignore_index
        column = zero_where_ignored(operands.input, operands.target).long().unsqueeze(1)
    else:
        valid, _, column = target_columns(operands.target, call.ignore_index, 0, operands.num_classes)
    objective = cross_entropy_of(call, operands.num_classes, dtype)
    return None if operands.weight is None else operands.weight.to(dtype), objective, valid, column


def rows_of_function(call: WithGrad) -> tuple[Any, ...]:
    """The same of a token function."""
    input, target = call.operands.input, call.operands.target
    tensors = tuple(zero_where_ignored(input, tensor) for tensor in call.tensors or ())
    valid, _, column = target_columns(target, call.ignore_index, 0, call.operands.num_classes)
    return None, FunctionObjective(token_loss_named(call.function), tensors, target != call.ignore_index), valid, column


def rows_of_shard(call: WithGrad, losses: Tensor, argmax: Tensor | None) -> tuple[Any, ...]:
    """The same of a vocabulary shard, and what combines its rows with those of the other ranks."""
    target, weight, start, own = call.operands.target, call.operands.weight, call.vocab_start, call.operands.num_classes
    valid, hit, column = target_columns(target, call.ignore_index, start, own)
    objective = cross_entropy_of(call, call.vocab_size, losses.dtype)
    own_weight = None if weight is None else weight[start : start + own].to(losses.dtype)
    of_shards = None
    if call.loss.label_smoothing:
        classes = shards_of_classes(slice(0, call.vocab_size), call.ranks)
        of_shards = class_weights_of_shards(weight, classes, losses)
    shared = SharedRows(Exchange(call.group, call.ranks), hit, start, argmax, of_shards)
    return own_weight, objective, valid, column, shared


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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Returns the two numbers of lse, the factor that turns E into probabilities, target_logit and logit_sum, all
        over whole rows.

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
        return pair[:, 0], pair[:, 1], factor, target_logit, logit_sum


def fill_statistics(statistics: TokenStatistics, rows: slice, of_block: BlockNumbers) -> None:
    """Writes the numbers of a block into those statistics that are not None."""
    pair = of_block.lse_pair
    lse = pair if statistics.lse is not None and statistics.lse.dim() == 2 else lse_of_pair(pair)
    entropy = None if of_block.expected_log_prob is None else 0.0 - of_block.expected_log_prob
    found = (of_block.argmax, lse, entropy, of_block.log_sum_sq_probs, of_block.mean_logit)
    for of_tokens, of_rows in zip(statistics, found):
        if of_tokens is not None:
            of_tokens[rows] = of_rows
