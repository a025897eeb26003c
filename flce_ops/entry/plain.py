"""The loss of plain tensors: picks the path, flattens the tokens, reduces in ATen over N numbers.

loss_and_argmax -> weighted_loss -> ..._with_grad | ..._forward        a scalar loss
                -> losses_from_forward -> ..._forward                  reduction="none"
"""

import torch
from torch import Tensor

from flce_ops import meta
from flce_ops.entry.arguments import check_arguments
from flce_ops.math.loss import loss_terms_of
from flce_ops.math.reduction import (
    mean_denominator,
    nan_for_nothing,
    quotient,
    row_factor,
    weighted_sum,
)
from flce_ops.math.scalars import Number, logit_scalars, scalar_unless
from flce_ops.ops.autocast import autocast_operands
from flce_ops.ops.paths import gradients_in_the_same_pass, needs_gradient

# N tokens, D hidden, V vocabulary


def loss_and_argmax(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    z_loss: Number = 0.0,
    token_weight: Tensor | None = None,
    normalizer: Tensor | None = None,
    argmax: bool,
) -> tuple[Tensor, Tensor | None]:
    input, linear_weight, linear_bias = autocast_operands(input.device.type, input, linear_weight, linear_bias)
    check_arguments(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction,
        label_smoothing,
        softcap,
        temperature,
        token_weight,
        normalizer,
    )
    target_shape = target.shape
    input = input.reshape(target.numel(), input.shape[-1])
    target = target.reshape(target.numel())  # -1 has no answer in a vmap over nothing
    accumulate = meta.accumulation_dtype(input.dtype)
    valid = target != ignore_index
    if token_weight is not None:
        token_weight = token_weight.reshape(token_weight.numel()).to(accumulate)
    loss_options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": scalar_unless(0.0, z_loss, input),
        **logit_scalars(logit_scale, softcap, temperature, input),
    }

    if reduction == "none":
        losses, largest = losses_from_forward(
            input, linear_weight, target, linear_bias, weight, **loss_options, argmax=argmax
        )
        if token_weight is not None:
            losses = losses * torch.where(valid, token_weight, 0.0)
        return losses.reshape(target_shape), largest.reshape(target_shape) if argmax else None

    denominator = mean_denominator(reduction, normalizer, target, valid, weight, accumulate)
    if reduction == "mean" and normalizer is None and weight is not None:
        denominator = nan_for_nothing(denominator)
    loss, total, largest = weighted_loss(
        input, linear_weight, target, linear_bias, weight, token_weight, denominator, **loss_options, argmax=argmax
    )
    return quotient(loss, total, denominator), largest.reshape(target_shape) if argmax else None


def weighted_loss(
    input: Tensor,  # (N, D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (N,)
    linear_bias: Tensor | None,  # (V,)
    weight: Tensor | None,  # (V,)
    token_weight: Tensor | None,  # (N,)
    denominator: Tensor | None,  # ()
    **options,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers for `quotient`, and argmax: (N,) or (0,)."""
    operands = (input, linear_weight, target, linear_bias, weight)
    valid = target != options["ignore_index"]
    if token_weight is None:
        slope = 1.0 if denominator is None else denominator.reciprocal()
        row_scale = torch.where(valid, slope, 0.0).to(meta.accumulation_dtype(input.dtype))
    else:
        row_scale = row_factor(valid, token_weight, denominator)
    if not gradients_in_the_same_pass(input, linear_weight, linear_bias):
        losses, largest = losses_from_forward(*operands, **options)
        return (row_scale * losses).sum(), weighted_sum(valid, token_weight, losses), largest
    mask = [needs_gradient(input), needs_gradient(linear_weight), needs_gradient(linear_bias)]
    loss, losses, *_, largest = torch.ops.flce.linear_cross_entropy_with_grad(
        *operands, row_scale, **options, output_mask=mask
    )
    return loss, weighted_sum(valid, token_weight, losses), largest


def losses_from_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: Tensor | None,  # ()
    softcap: Tensor | None,  # ()
    logit_scale: Tensor | None,  # ()
    argmax: bool = False,
) -> tuple[Tensor, Tensor]:  # (N,), 0 where ignored; argmax (N,) or (0,)
    """Losses per token as differentiable ATen over the forward operator's three numbers per row."""
    num_classes = linear_weight.shape[0]
    target_logit, lse, logit_sum, _, _, largest, lse_rest = torch.ops.flce.linear_cross_entropy_forward(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        ignore_index=ignore_index,
        logit_sum=label_smoothing != 0.0,
        softcap=softcap,
        logit_scale=logit_scale,
        argmax=argmax,
    )
    terms = loss_terms_of(target, weight, num_classes, label_smoothing, z_loss, lse.dtype)
    losses = terms.loss(target_logit, lse, logit_sum if label_smoothing else None, lse_rest)
    return torch.where(target != ignore_index, losses, 0.0), largest
