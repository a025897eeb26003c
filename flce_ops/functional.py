"""The public function and the body of the entry operator: what the arguments mean, which path runs, the reduction.

    linear_cross_entropy -> torch.ops.flce.linear_cross_entropy -> composite -> forward | with_grad -> reduction in ATen

The entry is CompositeImplicitAutograd, as ATen's scaled_dot_product_attention: it sees requires_grad, autocast and
tensor subclasses, and everything it does beyond the inner operators is ordinary differentiable ATen over N numbers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from flce_ops import meta
from flce_ops.arguments import OP, check_arguments, resolve_ignore_index
from flce_ops.dtensor import any_dtensor
from flce_ops.learnt_scale import apply_learnt_scale, refuse_tensors
from flce_ops.loss import class_weight_of, loss_terms_of
from flce_ops.meta.checks import is_dense
from flce_ops.scalars import Number, logit_scalars, normalizer_tensor, scalar_unless
from flce_ops.torch_private import (
    functorch_is_active,
    saved_tensor_hooks_are_active,
    tracing_a_checkpointed_region,
    without_autocast,
)

# N tokens, D hidden, V vocabulary


class LinearCrossEntropyMetrics(NamedTuple):
    """By-products of the loss; constants, no gradient flows through them."""

    token_accuracy: Tensor  # (), float32: share of the tokens not ignored whose target has the largest logit
    argmax: Tensor  # target's shape, int64: class of the largest logit, at ignored tokens too


def linear_cross_entropy(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    weight: Tensor | None = None,  # (V,)
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,  # ()
    return_metrics: bool = False,
) -> Tensor | tuple[Tensor, "LinearCrossEntropyMetrics"]:
    r"""Same as ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)``, without the (N, V) logits.

    Per token that is not ignored, with ``u = input @ linear_weight.T + linear_bias``::

        z    = logit_scale * u                    then, with softcap:  softcap * tanh(z / softcap)
        z    = z / temperature
        lse  = logsumexp_j z_j
        loss = token_weight * [ (1 - label_smoothing) * weight_y * (lse - z_y)
                                + label_smoothing / V * sum_j weight_j * (lse - z_j)
                                + z_loss * lse ** 2 ]

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: class indices in [0, V) or ``ignore_index``, (...), int64 or int32.
        linear_bias: (V,), in input's dtype.
        weight: class weights, (V,), as F.cross_entropy's; constants, they get no gradient.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of tokens not
            ignored, or by the sum of their class weights. "sum".
        ignore_index: target value that contributes neither loss nor gradient. None is -100, as torch's.
        label_smoothing: in [0, 1].
        softcap: bound on the logits' magnitude (Gemma 2), applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap (Cohere, Granite): a number, or a 0-d tensor (CLIP), which
            gets its gradient and is multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        z_loss: factor of the squared logsumexp (PaLM), inside the sum that "mean" divides.
        token_weight: factor per token, (...); it does not enter the denominator of "mean".
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum": the number
            of target tokens in the whole batch under gradient accumulation or data parallelism.
            Over 0 the loss and its gradients are those of losses.sum() / normalizer.
        return_metrics: also return what the logits were used for, from the same pass and without a host sync.

    Returns:
        float32 (float64 for float64 input): shape () or, for "none", target's. In nats per token.
        With ``return_metrics`` a pair: that loss, and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``.

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        IndexError: a target outside [0, V); on CUDA a device-side assert instead, without a host sync.
        NotImplementedError: forward-mode or third derivatives; a gradient for ``weight``.

    Composability:
        torch.compile(fullgraph=True), torch.export, autocast, torch.func.grad / vmap, double backward, activation
        checkpointing, CUDA graphs. Gradients of a scalar loss are made during forward, in the same pass over the
        logits; in float16, under checkpointing, torch.func and reduction="none" backward recomputes the logits instead.

    Source:
        Memory idea: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024. See DESIGN.md.
    """
    refuse_tensors(OP, softcap=softcap, z_loss=z_loss, label_smoothing=label_smoothing)
    input, linear_bias, logit_scale, temperature = apply_learnt_scale(
        OP, input, linear_bias, logit_scale, temperature, softcap
    )
    normalizer = normalizer_tensor(normalizer, input)
    tensors = (input, linear_weight, target, linear_bias, weight, token_weight, normalizer)
    if return_metrics:
        entry = entry_of(torch.ops.flce.linear_cross_entropy_metrics, composite_metrics, *tensors)
    else:
        entry = entry_of(torch.ops.flce.linear_cross_entropy, composite, *tensors)
    result = entry(
        input,
        linear_weight,
        target,
        linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=resolve_ignore_index(OP, ignore_index, target),
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        z_loss=z_loss,
        token_weight=token_weight,
        normalizer=normalizer,
    )
    if not return_metrics:
        return result
    loss, token_accuracy, argmax = result
    return loss, LinearCrossEntropyMetrics(token_accuracy, argmax)


def entry_of(op: torch._ops.OpOverloadPacket, body: Callable, *tensors: Tensor | None) -> Callable:
    """`op`, whose body autograd's key runs; in inference mode DTensor would see it first and refuse plain tensors."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return body if inference and any_dtensor(*tensors) else op


def composite(*args, **options) -> Tensor:
    """Body of torch.ops.flce.linear_cross_entropy."""
    return loss_and_argmax(*args, **options, argmax=False)[0]


def composite_metrics(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics: (loss, token_accuracy, argmax)."""
    if any_dtensor(input, linear_weight, target):
        from flce_ops.distributed import dtensor_composite_metrics

        return dtensor_composite_metrics(input, linear_weight, target, linear_bias, **options)
    loss, argmax = loss_and_argmax(input, linear_weight, target, linear_bias, **options, argmax=True)
    right = right_and_valid(argmax, target, options.get("ignore_index", -100))
    return loss, accuracy_of(right), argmax


def right_and_valid(argmax: Tensor, target: Tensor, ignore_index: int) -> Tensor:  # (...), (...) -> (2,) int64
    valid = target != ignore_index
    return torch.stack([(valid & (argmax == target)).sum(), valid.sum()])


def accuracy_of(counts: Tensor) -> Tensor:  # (2,) -> (); nan where no token is valid
    right, valid = counts.to(torch.float32).unbind()  # integers divide in the default dtype, which may be a half one
    return right / valid


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
    if any_dtensor(input, linear_weight, target, linear_bias, weight, token_weight, normalizer):
        from flce_ops.distributed import dtensor_composite  # builds on torch.distributed.tensor: only for its users

        return dtensor_composite(
            input,
            linear_weight,
            target,
            linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=temperature,
            z_loss=z_loss,
            token_weight=token_weight,
            normalizer=normalizer,
            argmax=argmax,
        )
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


def mean_denominator(
    reduction: str,
    normalizer: Tensor | None,
    target: Tensor,
    valid: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:  # ()
    if normalizer is not None:
        return normalizer.to(dtype)
    if reduction == "sum":
        return None
    if weight is None:
        return valid.sum().to(dtype)
    return torch.where(valid, class_weight_of(target, weight, dtype), 0.0).sum()


def nan_for_nothing(denominator: Tensor) -> Tensor:  # () -> ()
    """F.cross_entropy's mean over targets whose class weights add up to 0 is nan, and so are its gradients by tokens
    that are not ignored: with label smoothing too, as it divides the targets' part apart, which is 0 / 0.
    """
    return torch.where(denominator == 0.0, torch.nan, denominator)


def row_factor(
    valid: Tensor | None,  # (N,), None where every token counts
    token_weight: Tensor,  # (N,)
    denominator: Tensor | None,  # ()
) -> Tensor:  # (N,)
    """The slope of the loss by each token's own: inf or nan over a denominator of 0, but 0 where ignored."""
    if valid is not None:
        # the weight of an ignored token may be anything and gets gradient 0, also where the denominator is 0
        token_weight = torch.where(valid, token_weight, 0.0)
    if denominator is None:
        return token_weight
    return token_weight / (denominator if valid is None else torch.where(valid, denominator, 1.0))


def weighted_sum(valid: Tensor | None, token_weight: Tensor | None, losses: Tensor) -> Tensor:  # (N,) each -> ()
    """What the denominator divides; a constant, as `quotient` wants it."""
    losses = losses.detach()  # 0 where ignored
    return losses.sum() if token_weight is None else (row_factor(valid, token_weight.detach(), None) * losses).sum()


def quotient(loss: Tensor, total: Tensor, denominator: Tensor | None) -> Tensor:  # () each
    """total / denominator with the gradient of `loss`, the sum of the tokens' own quotients.

    The same number but over 0: sum() / 0 is nan only where the sum is 0 too, the quotients of single tokens may be nan
    before.
    """
    return ValueOf.apply(loss, total if denominator is None else total / denominator.detach())


class ValueOf(Function):
    """The second argument, with the gradient of the first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(loss: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, _) -> Tensor:  # by token_weight or normalizer alone; by the operands it is refused
        return tangent.clone()


def gradients_in_the_same_pass(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> bool:
    """Whether a scalar loss makes its gradients during forward: 3 GEMM passes instead of 4.

    Not inside a checkpointed region, whose forward runs twice and would make them twice; not under torch.func, whose
    backward always asks for a graph, which gradients made in advance do not have. Not in float16: what fits it depends
    on the loss scale that backward brings, nearly always. By the planner's model 4 passes in Triton take 1.02 of the
    time of 3 in ATen at 8192x4096x128256 on an H200, 0.78 at D = 2304, 0.63 at D = 896.
    """
    return (
        input.dtype != torch.float16
        and any(needs_gradient(tensor) for tensor in (input, linear_weight, linear_bias))
        and not functorch_is_active()
        and not saved_tensor_hooks_are_active()
        and not tracing_a_checkpointed_region()
    )


def needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def autocast_operands(device_type: str, *operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """The operands as autocast hands them to F.linear: floating, but for float64, in the autocast dtype."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and is_dense(tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
        else tensor
        for tensor in operands
    )


def autocast_kernel(op: torch._ops.OpOverload, device_type: str) -> Callable:
    """The autocast kernel of an inner operator (input, linear_weight, target, linear_bias, ...)."""

    def run(input, linear_weight, target, linear_bias=None, *args, **kwargs):
        input, linear_weight, linear_bias = autocast_operands(device_type, input, linear_weight, linear_bias)
        with without_autocast(device_type):
            return op(input, linear_weight, target, linear_bias, *args, **kwargs)

    return run
