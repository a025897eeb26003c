"""The backward operators: recompute the logits that forward did not save, or read given ones, and make their gradient
from the cotangents of the row numbers. Of a head, two GEMMs follow.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..math.shards import target_columns
from ..meta.arguments import Backward, BackwardInPlace, LogitsBackward
from .chunks import copied_rows
from .gradients import GivenRows, GradientAccumulator, products_and_gradients, run_blocks
from .logits import add_target_and_sum, softmax_factors, softmax_gradient, upcast
from .valid_tokens import kernel_of

# N tokens, n rows of a chunk, D hidden, V vocabulary


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
