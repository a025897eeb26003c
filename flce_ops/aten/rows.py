"""The forward and backward operators, of a head and of given logits.

forward     the numbers of each row that a loss needs
backward    makes the gradient of the logits from the cotangents of these numbers. It recomputes the logits that forward
            did not save, or reads given ones. For a head, two GEMMs follow.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.options import Statistics
from ..math.shards import target_columns
from ..meta.arguments import Backward, BackwardInPlace, Forward, LogitsBackward, LogitsForward
from .chunks import chunk_products, copied_rows, copy_bytes, product_is_rounded, rows_per_chunk
from .gradients import GivenRows, GradientAccumulator, products_and_gradients, run_blocks
from .logits import (
    add_target_and_sum,
    at_columns,
    extra_matrices,
    reduce_rows,
    softmax_factors,
    softmax_gradient,
    upcast,
)
from .valid_tokens import kernel_of, zero_where_ignored

# N tokens, n rows of a chunk, D hidden, V vocabulary


@kernel_of(Forward, checks_target=True)
def forward(call: Forward, outputs: Sequence[Tensor]) -> None:
    input, linear_weight, _, linear_bias, _ = call.operands
    num_classes, saved = linear_weight.shape[0], None
    asked = Statistics(call.argmax, True, call.expected_log_prob, call.log_sum_sq_probs, call.mean_logit)
    in_block = product_is_rounded(input) + extra_matrices(asked)
    step = rows_per_chunk(input, num_classes, matrices_in_block=in_block, reserved=copy_bytes(linear_weight))
    if call.retain:
        saved = outputs[-1].view(input.dtype)
        saved[:, num_classes:].zero_()
        saved[input.shape[0] :].zero_()
    products = chunk_products(call, input, linear_weight, linear_bias, step, saved=saved)
    numbers_of_rows(call, outputs, products, asked)


@kernel_of(LogitsForward, checks_target=True)
def logits_forward(call: LogitsForward, outputs: Sequence[Tensor]) -> None:
    numbers_of_rows(call, outputs, copied_rows(call), Statistics(argmax=call.argmax))


def numbers_of_rows(
    call: Any,
    outputs: Sequence[Tensor],
    products: Iterable[tuple[slice, Tensor]],  # the rows of each chunk and their u, (n, V), which is overwritten
    asked: Statistics,
) -> None:
    made = {result.name: output for result, output in zip(call.results, outputs)}
    input, target, weight = call.operands[0], call.operands.target, upcast(call.operands.weight, made["lse_pair"].dtype)
    num_classes, start, whole = call.operands.num_classes, *map(vars(call).get, ("vocab_start", "vocab_size"))
    if target.dim() == 2 or whole is not None or start:  # a shard, which lacks some classes
        _, hit, column = target_columns(target, call.ignore_index, start or 0, num_classes)
    else:
        hit, column = None, zero_where_ignored(input, target).long().unsqueeze(1)
    weight_sum = (num_classes if weight is None else weight.sum()) if call.logit_sum else None

    def numbers(rows: slice, logits: Tensor, own_column: Tensor, own_target_logit: Tensor) -> None:
        at_target = at_columns(logits, own_column, own_target_logit)
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
    gradients_of_head(call, (grads[0], main_grad, *grads[2:]))


@kernel_of(Backward)
def backward(call: Backward, grads: Sequence[Tensor]) -> None:
    gradients_of_head(call, grads)


@kernel_of(LogitsBackward)
def logits_backward(call: LogitsBackward, grads: Sequence[Tensor]) -> None:
    gradients_of_rows(call, copied_rows(call), GivenRows(grads[0]))


def gradients_of_head(call: Backward, grads: Sequence[Tensor]) -> None:
    # p and its factor are separate matrices if the factor depends on the class
    in_block = int(call.grad_expected_log_prob is not None)
    retained = None if call.retained is None else call.retained.view(call.operands.input.dtype)
    gradients_of_rows(call, *products_and_gradients(call, grads, in_block, retained))


def gradients_of_rows(call: Any, products: Iterable[tuple[slice, Tensor]], gradients: GradientAccumulator) -> None:
    operands, start = call.operands, vars(call).get("vocab_start", 0)
    valid, hit, column = target_columns(operands.target, call.ignore_index, start, operands.num_classes)
    cotangents = call.cotangents.masked(hit, valid, call.lse_pair.dtype)
    factors = softmax_factors(call, valid, cotangents.grad_lse)
    weight = upcast(operands.weight, call.lse_pair.dtype)

    def gradient(rows: slice, logits: Tensor) -> Tensor | None:
        own = cotangents.of(rows)
        add_target_and_sum(softmax_gradient(logits, factors.of(rows)), column[rows], own, weight)
        return own.grad_lse

    run_blocks(call, products, gradient, gradients=gradients)
