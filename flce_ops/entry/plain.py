"""The loss of plain tensors: picks the path, flattens the tokens, reduces over N numbers.

loss_and_argmax -> mean_in_one_pass -> ..._with_grad                   a training step's loss, divided by the operator
                -> weighted_loss -> ..._with_grad | ..._forward        another scalar loss, reduced in ATen
                -> losses_from_forward -> ..._forward                  reduction="none"
"""

import torch
from torch import Tensor

from flce_ops.entry.arguments import check_arguments
from flce_ops.entry.schemas import CrossEntropy
from flce_ops.entry.sparse_gradient import check_sparse_gradient
from flce_ops.entry.weightless import without_weightless
from flce_ops.math.loss import losses_of_rows
from flce_ops.math.options import Operands, TokenLosses
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import Reduction, denominator_of_all, quotient, row_factor, weighted_sum
from flce_ops.math.scalars import logit_options, loss_options, scalar
from flce_ops.ops.autocast import autocast_operands
from flce_ops.ops.paths import gradients_in_the_same_pass, needs_gradient
from flce_ops.support.differentiated import differentiated

# N tokens, D hidden, V vocabulary


def loss_and_argmax(call: CrossEntropy, argmax: bool) -> tuple[Tensor, Tensor | None]:
    shape = call.target.shape
    call.input, call.linear_weight, call.linear_bias = autocast_operands(
        call.input.device.type, call.input, call.linear_weight, call.linear_bias
    )
    check_arguments(call)
    check_sparse_gradient(call)
    tokens = call.target.numel()  # -1 has no answer in a vmap over nothing
    target = call.target.reshape(tokens)
    input = call.input.reshape(tokens, call.input.shape[-1])
    problem = token_losses(call, Operands(input, call.linear_weight, target, call.linear_bias, call.weight), argmax)
    if token_factors_are_equal(call) and in_the_same_pass(problem):
        loss, largest = mean_in_one_pass(call, problem)
        return loss, largest.reshape(shape) if argmax else None
    accumulate = accumulation_dtype(input.dtype)
    valid = problem.valid
    token_weight = None if call.token_weight is None else call.token_weight.reshape(tokens).to(accumulate)

    if call.reduction == "none":
        factor = None if token_weight is None else torch.where(valid, token_weight, 0.0)
        if factor is not None:
            problem = without_weightless(problem, token_weight, factor, call.linear_weight.shape[0])
        losses, largest = losses_from_forward(problem)
        losses = losses if factor is None else losses * factor
        return losses.reshape(shape), largest.reshape(shape) if argmax else None

    denominator = denominator_of(call, problem)
    loss, total, largest = weighted_loss(problem, valid, token_weight, denominator)
    return quotient(loss, total, denominator), largest.reshape(shape) if argmax else None


def token_factors_are_equal(call: CrossEntropy) -> bool:
    """All tokens that count have one factor, and nobody asks for its gradient."""
    return call.reduction != "none" and call.token_weight is None and not differentiated(call.normalizer)


def mean_in_one_pass(call: CrossEntropy, problem: TokenLosses) -> tuple[Tensor, Tensor]:
    """The loss, and argmax: (N,) or (0,). The operator counts the tokens: in ATen that is seven launches."""
    input = call.input
    if call.reduction == "mean" and call.normalizer is None and call.weight is None:
        denominator = None
    elif call.normalizer is not None and call.normalizer.device != input.device:  # on the CPU, as a number would be
        denominator = scalar(1.0, input) * call.normalizer
    else:
        denominator = denominator_of(call, problem)
        denominator = scalar(1.0, input) if denominator is None else denominator
    loss, _, largest = losses_with_grad(problem, Reduction(None, denominator))
    return loss, largest


def denominator_of(call: CrossEntropy, problem: TokenLosses) -> Tensor | None:  # ()
    dtype, operands = accumulation_dtype(call.input.dtype), problem.operands
    return denominator_of_all(call.reduction, call.normalizer, problem.valid, dtype, operands.target, operands.weight)


def token_losses(call: CrossEntropy, operands: Operands, argmax: bool) -> TokenLosses:
    input = operands.input
    loss, logits = loss_options(call.numbers, input), logit_options(call.numbers, input)
    return TokenLosses(operands, call.ignore_index, loss, logits, argmax, call.sparse)


def in_the_same_pass(problem: TokenLosses) -> bool:
    input, linear_weight, _, linear_bias, _ = problem.operands
    sparse = problem.sparse.gradient_threshold != 0.0
    return gradients_in_the_same_pass(input, linear_weight, linear_bias, sparse=sparse)


def weighted_loss(
    problem: TokenLosses,
    valid: Tensor,  # (N,)
    token_weight: Tensor | None,  # (N,)
    denominator: Tensor | None,  # ()
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Two numbers for `quotient`, and argmax: (N,) or (0,)."""
    input, linear_weight, _, linear_bias, _ = problem.operands
    wants_gradient = differentiated(input, linear_weight, linear_bias, token_weight, denominator)
    if token_weight is None and not wants_gradient:
        losses, largest = losses_from_forward(problem)
        return None, losses.sum(), largest
    row_scale = row_factor(valid, token_weight, denominator, accumulation_dtype(input.dtype))
    problem = without_weightless(problem, token_weight, row_scale, linear_weight.shape[0])
    if not in_the_same_pass(problem):
        losses, largest = losses_from_forward(problem)
        loss = (row_scale * losses).sum() if wants_gradient else None
        return loss, weighted_sum(valid, token_weight, losses), largest
    loss, losses, largest = losses_with_grad(problem, Reduction(row_scale))
    return loss, weighted_sum(valid, token_weight, losses), largest


def losses_with_grad(problem: TokenLosses, reduction: Reduction) -> tuple[Tensor, Tensor, Tensor]:
    """() with its gradients, the losses of tokens (N,), and argmax: (N,) or (0,)."""
    input, linear_weight, _, linear_bias, _ = problem.operands
    mask = [needs_gradient(input), needs_gradient(linear_weight), needs_gradient(linear_bias)]
    options = problem.options | problem.sparse._asdict()
    loss, losses, *_, largest = torch.ops.flce.linear_cross_entropy_with_grad(
        *problem.operands, *reduction, **options, output_mask=mask, argmax=problem.argmax
    )
    return loss, losses, largest


def losses_from_forward(problem: TokenLosses) -> tuple[Tensor, Tensor]:  # (N,), 0 where ignored; argmax (N,) or (0,)
    """Losses per token as differentiable ATen over the forward operator's three numbers per row."""
    operands = problem.operands
    target_logit, lse, logit_sum, _, _, largest, lse_rest, _ = torch.ops.flce.linear_cross_entropy_forward(
        *operands,
        ignore_index=problem.ignore_index,
        logit_sum=problem.loss.label_smoothing != 0.0,
        **problem.logits._asdict(),
        argmax=problem.argmax,
    )
    rows = (target_logit, lse, logit_sum, lse_rest)
    _, losses, _ = losses_of_rows(operands, problem.ignore_index, problem.loss, operands.linear_weight.shape[0], *rows)
    return losses, largest
