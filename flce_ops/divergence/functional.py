"""The public function and the body of the entry operator: what the arguments mean, which path runs, the reduction.

linear_kl_div -> torch.ops.flce.linear_kl_div -> composite -> forward | with_grad -> reduction in ATen
"""

import math

import torch
from torch import Tensor

from flce_ops.arguments import check_positive, resolve_ignore_index
from flce_ops.divergence.checks import OP, check_arguments, check_kind
from flce_ops.divergence.operands import Operands, Options
from flce_ops.dtensor import any_dtensor
from flce_ops.functional import (
    autocast_operands,
    entry_of,
    gradients_in_the_same_pass,
    needs_gradient,
    quotient,
    row_factor,
    weighted_sum,
)
from flce_ops.learnt_scale import apply_learnt_scale, refuse_tensors
from flce_ops.meta import accumulation_dtype
from flce_ops.scalars import Number, logit_scalars, normalizer_tensor, scalar

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def linear_kl_div(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    teacher_input: Tensor | None = None,  # (..., E)
    teacher_weight: Tensor | None = None,  # (V, E)
    *,
    teacher_probs: Tensor | None = None,  # (..., V)
    linear_bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V,)
    kind: str = "forward",
    beta: float = 0.5,
    target: Tensor | None = None,  # (...)
    ignore_index: int | None = -100,
    token_weight: Tensor | None = None,  # (...)
    reduction: str = "mean",
    normalizer: Tensor | float | None = None,  # ()
    logit_scale: float | Tensor = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    teacher_logit_scale: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    r"""Distillation loss whose logits, student's and teacher's, are never held whole.

    Same as ``F.kl_div(F.log_softmax(F.linear(input, linear_weight), -1), F.log_softmax(F.linear(teacher_input,
    teacher_weight), -1), log_target=True, reduction="none").sum(-1).mean()`` without the (N, V) matrices.

    Per token that is not ignored, with q the student's and p the teacher's probabilities over the vocabulary::

        z = logit_scale * (input @ linear_weight.T + linear_bias)    then, with softcap:  softcap * tanh(z / softcap)
        q = softmax(z / temperature),   p = softmax of the same with the teacher's tensors, or teacher_probs
        m = beta * p + (1 - beta) * q

        "forward"  KL(p || q) = sum p (log p - log q)
        "reverse"  KL(q || p) = sum q (log q - log p)
        "jsd"      beta * KL(p || m) + (1 - beta) * KL(q || m)

    Args:
        input: the student's hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the student's head, (V, D), in input's dtype (any floating dtype under autocast).
        teacher_input: the teacher's hidden states, (..., E): as many tokens; E need not be D, nor the dtype input's.
        teacher_weight: weight of the teacher's head, (V, E), in teacher_input's dtype; the vocabulary is the student's.
        teacher_probs: probabilities, (..., V), instead of the pair; exact zeros are fine. Where they do not add up to
            1, such as a truncated top-k, value and gradient are those of the sums above.
        linear_bias, teacher_bias: (V,).
        kind: "forward", "reverse" or "jsd".
        beta: weight of the teacher in the mixture of "jsd", as in TRL's generalized_jsd_loss, Liger's fused linear JSD
            and Agarwal et al.: 0 stands for "forward" and 1 for "reverse".
        target: read only to see which tokens are ignored, (...), int64 or int32: those equal to ``ignore_index``.
        ignore_index: None is -100.
        token_weight: factor per token, (...); it does not enter the denominator of "mean". Differentiable.
        reduction: "none": divergence per token, 0 where ignored. "mean": sum over tokens divided by the number of
            tokens not ignored (F.kl_div's "batchmean" of flattened tokens; nan without one). "sum".
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum".
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient and is
            multiplied into input and linear_bias; teacher_logit_scale must then be given.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        temperature: divides the student's and the teacher's logits behind the caps. The factor temperature ** 2 that
            keeps the gradient's size (Hinton et al.) is yours to multiply the loss with.
        teacher_logit_scale: the teacher's; logit_scale by default.
        teacher_softcap: the teacher's; none by default, also where the student has one.

    Returns:
        float32 (float64 for float64 input): shape () or, for "none", (...). In nats per token. Inf where the first
        distribution has probability on a class to which the second gives exactly 0 (teacher_probs under "reverse").

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        NotImplementedError: a teacher tensor that requires a gradient (the teacher is constant: detach it);
            forward-mode or second derivatives; a layout of DTensors that docs/distillation.md does not list.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, activation checkpointing, DTensor with tokens
        or vocabulary sharded. Gradients of a scalar loss are made during forward, in the same pass over the logits;
        in float16, under checkpointing, torch.func and reduction="none" backward recomputes the logits instead.

    Source:
        Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; Agarwal et al., "On-Policy Distillation of
        Language Models", 2024. See docs/distillation.md.
    """
    refuse_tensors(
        OP,
        beta=beta,
        softcap=softcap,
        temperature=temperature,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap,
    )
    if isinstance(logit_scale, Tensor) and teacher_logit_scale is None and teacher_probs is None:
        raise ValueError(
            f"{OP}: logit_scale is a tensor, which the student's alone can be; pass the teacher's as a number: "
            "teacher_logit_scale=1.0, say"
        )
    input, linear_bias, logit_scale, _ = apply_learnt_scale(OP, input, linear_bias, logit_scale, temperature, softcap)
    normalizer = normalizer_tensor(normalizer, input)
    operands = (input, linear_weight, teacher_input, teacher_weight, teacher_probs, linear_bias, teacher_bias)
    entry = entry_of(torch.ops.flce.linear_kl_div, composite, *operands, target, token_weight, normalizer)
    return entry(
        input,
        linear_weight,
        teacher_input,
        teacher_weight,
        teacher_probs=teacher_probs,
        linear_bias=linear_bias,
        teacher_bias=teacher_bias,
        kind=kind,
        beta=beta,
        target=target,
        ignore_index=resolve_ignore_index(OP, ignore_index, target),
        token_weight=token_weight,
        reduction=reduction,
        normalizer=normalizer,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap,
    )


def composite(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    teacher_probs: Tensor | None = None,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    kind: str = "forward",
    beta: Number = 0.5,
    target: Tensor | None = None,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,
    reduction: str = "mean",
    normalizer: Tensor | None = None,
    logit_scale: Number = 1.0,
    softcap: Number | None = None,
    temperature: Number = 1.0,
    teacher_logit_scale: Number | None = None,
    teacher_softcap: Number | None = None,
) -> Tensor:
    """Body of torch.ops.flce.linear_kl_div."""
    operands = Operands(input, linear_weight, linear_bias, teacher_input, teacher_weight, teacher_bias, teacher_probs)
    check_positive(OP, softcap=softcap, teacher_softcap=teacher_softcap, temperature=temperature)
    kind = resolve_kind(kind, beta)
    student = logit_scalars(logit_scale, softcap, temperature, input)
    teacher_logit_scale = logit_scale if teacher_logit_scale is None else teacher_logit_scale
    teacher = logit_scalars(
        teacher_logit_scale, teacher_softcap, temperature, input if teacher_input is None else teacher_input
    )
    options = Options(
        kind=kind,
        beta=scalar(beta, input) if kind == "jsd" else None,
        **student,
        teacher_logit_scale=teacher["logit_scale"],
        teacher_softcap=teacher["softcap"],
    )
    arguments = (target, token_weight, reduction, normalizer)
    if any_dtensor(*operands, target, token_weight, normalizer):
        from flce_ops.divergence.sharded import dtensor_composite  # builds on torch.distributed.tensor

        return dtensor_composite(operands, options, *arguments, ignore_index)
    operands = autocast_pairs(operands)
    check_arguments(operands, *arguments)
    shape = input.shape[:-1]
    operands = flatten_tokens(operands, target, ignore_index)
    token_weight = flat_token_weight(operands, token_weight)
    if reduction == "none":
        return row_divergences(operands, options, row_factor(operands.valid, token_weight, None)).reshape(shape)
    denominator = denominator_of(operands, reduction, normalizer)
    return quotient(*weighted_loss(operands, options, token_weight, denominator), denominator)


def resolve_kind(kind: str, beta: Number) -> str:
    """beta = 0 and 1 name the two divergences that "jsd" tends to, up to the factors beta and 1 - beta."""
    if kind != "jsd" or 0.0 < beta < 1.0:
        check_kind(OP, kind)
        return kind
    if beta not in (0.0, 1.0):
        raise ValueError(f"{OP}: expected beta in [0, 1], got {beta}")
    return "reverse" if beta else "forward"


def autocast_pairs(operands: Operands) -> Operands:
    """Under autocast, both pairs as it hands them to F.linear. Given probabilities stay as they are."""
    pairs = autocast_operands(operands.input.device.type, *operands[:6])
    return Operands(*pairs, *operands[6:])


def flatten_tokens(operands: Operands, target: Tensor | None, ignore_index: int) -> Operands:
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


def denominator_of(operands: Operands, reduction: str, normalizer: Tensor | None) -> Tensor | None:  # ()
    dtype = accumulation_dtype(operands.input.dtype)
    if normalizer is not None:
        return normalizer.to(dtype)
    if reduction == "sum":
        return None
    valid = operands.valid
    if valid is None:
        valid = torch.ones(operands.input.shape[0], dtype=torch.bool, device=operands.input.device)
    return valid.sum().to(dtype)


def flat_token_weight(operands: Operands, token_weight: Tensor | None) -> Tensor:  # (...) -> (N,)
    input = operands.input
    dtype = accumulation_dtype(input.dtype)
    if token_weight is None:
        return torch.ones(input.shape[0], dtype=dtype, device=input.device)
    return token_weight.reshape(token_weight.numel()).to(dtype)


def row_divergences(operands: Operands, options: Options, factor: Tensor) -> Tensor:  # (N,)
    return factor * torch.ops.flce.linear_kl_div_forward(*operands, **vars(options))[0]


def weighted_loss(
    operands: Operands,
    options: Options,
    token_weight: Tensor,  # (N,)
    denominator: Tensor | None,  # ()
) -> tuple[Tensor, Tensor]:
    """Two numbers for `quotient`, in one pass with the gradients where those are wanted."""
    input, linear_weight, linear_bias = operands[:3]
    factor = row_factor(operands.valid, token_weight, denominator)
    if not gradients_in_the_same_pass(input, linear_weight, linear_bias):
        divergence = torch.ops.flce.linear_kl_div_forward(*operands, **vars(options))[0]
        return (factor * divergence).sum(), weighted_sum(operands.valid, token_weight, divergence)
    mask = [needs_gradient(tensor) for tensor in (input, linear_weight, linear_bias)]
    loss, divergence, *_ = torch.ops.flce.linear_kl_div_with_grad(*operands, factor, **vars(options), output_mask=mask)
    return loss, weighted_sum(operands.valid, token_weight, divergence)
