"""linear_kl_div of plain tensors: picks the path, flattens the tokens, reduces in ATen over N numbers."""

import math

import torch
from torch import Tensor

from flce_ops.entry.kl_div_checks import check_arguments
from flce_ops.entry.weightless import valid_and_weighted
from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import mean_denominator, quotient, row_factor, weighted_sum
from flce_ops.ops.autocast import autocast_operands
from flce_ops.ops.paths import gradients_in_the_same_pass
from flce_ops.ops.situations import needs_gradient

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def plain_composite(
    operands: KlDivOperands,  # of shape (..., D) still
    options: KlDivOptions,
    target: Tensor | None,  # (...)
    token_weight: Tensor | None,  # (...)
    reduction: str,
    normalizer: Tensor | None,  # ()
    ignore_index: int,
) -> Tensor:
    operands = autocast_pairs(operands)
    check_arguments(operands, target, token_weight, reduction, normalizer)
    shape = operands.input.shape[:-1]
    operands = flatten_tokens(operands, target, ignore_index)
    denominator = None if reduction == "none" else denominator_of(operands, reduction, normalizer)
    if denominator is not None and normalizer is None:
        denominator = denominator.clamp(min=1.0)  # the mean over no token is 0
    operands, token_weight = weigh_tokens(operands, token_weight, denominator)
    if reduction == "none":
        return row_divergences(operands, options, row_factor(operands.valid, token_weight, None)).reshape(shape)
    return quotient(*weighted_loss(operands, options, token_weight, denominator), denominator)


def autocast_pairs(operands: KlDivOperands) -> KlDivOperands:
    """Under autocast, both pairs as it hands them to F.linear. Given probabilities stay as they are."""
    pairs = autocast_operands(operands.input.device.type, *operands[:6])
    return operands._replace(**dict(zip(KlDivOperands._fields, pairs)))


def flatten_tokens(operands: KlDivOperands, target: Tensor | None, ignore_index: int) -> KlDivOperands:
    """(..., D) as (N, D), and which tokens count."""
    tokens = math.prod(operands.input.shape[:-1])  # Size.numel() would make a symbolic length a constant

    def flat(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.reshape(tokens, tensor.shape[-1])

    return operands._replace(
        input=flat(operands.input),
        teacher_input=flat(operands.teacher_input),
        teacher_probs=flat(operands.teacher_probs),
        valid=None if target is None else target.reshape(tokens) != ignore_index,
    )


def denominator_of(operands: KlDivOperands, reduction: str, normalizer: Tensor | None) -> Tensor | None:  # ()
    valid = operands.valid
    if valid is None:
        valid = torch.ones(operands.input.shape[0], dtype=torch.bool, device=operands.input.device)
    return mean_denominator(reduction, normalizer, valid, accumulation_dtype(operands.input.dtype))


def weigh_tokens(
    operands: KlDivOperands,
    token_weight: Tensor | None,  # (...)
    denominator: Tensor | None,  # ()
) -> tuple[KlDivOperands, Tensor]:
    """Without the tokens of weight 0, which the denominator counts; (N,) weights."""
    input = operands.input
    dtype = accumulation_dtype(input.dtype)
    if token_weight is None:
        return operands, torch.ones(input.shape[0], dtype=dtype, device=input.device)
    token_weight = token_weight.reshape(token_weight.numel()).to(dtype)
    factor = row_factor(operands.valid, token_weight, denominator)
    return operands._replace(valid=valid_and_weighted(operands.valid, token_weight, factor)), token_weight


def row_divergences(operands: KlDivOperands, options: KlDivOptions, factor: Tensor) -> Tensor:  # (N,)
    return factor * torch.ops.flce.linear_kl_div_forward(*operands, **options._asdict())[0]


def weighted_loss(
    operands: KlDivOperands,
    options: KlDivOptions,
    token_weight: Tensor,  # (N,)
    denominator: Tensor | None,  # ()
) -> tuple[Tensor, Tensor]:
    """Two numbers for `quotient`, in one pass with the gradients where those are wanted."""
    input, linear_weight, linear_bias = operands[:3]
    factor = row_factor(operands.valid, token_weight, denominator)
    if not gradients_in_the_same_pass(input, linear_weight, linear_bias):
        divergence = torch.ops.flce.linear_kl_div_forward(*operands, **options._asdict())[0]
        return (factor * divergence).sum(), weighted_sum(operands.valid, token_weight, divergence)
    mask = [needs_gradient(tensor) for tensor in (input, linear_weight, linear_bias)]
    loss, divergence, *_ = torch.ops.flce.linear_kl_div_with_grad(
        *operands, factor, **options._asdict(), output_mask=mask
    )
    return loss, weighted_sum(operands.valid, token_weight, divergence)
