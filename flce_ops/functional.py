"""The public functions: what the arguments mean, and the call of the entry operator.

linear_cross_entropy -> torch.ops.flce.linear_cross_entropy -> its body: flce_ops/entry/
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flce_ops.entry import cross_entropy as linear
from flce_ops.entry import kl_div, log_probs, logits_plain
from flce_ops.entry import logits as given_logits
from flce_ops.entry.arguments import resolve_ignore_index
from flce_ops.entry.learnt_scale import apply_learnt_scale, refuse_tensors
from flce_ops.entry.torch_options import check_torch_options
from flce_ops.math.scalars import normalizer_tensor
from flce_ops.support.dtensor import any_dtensor

# N tokens, D hidden, V vocabulary

# of cross_entropy, by return_metrics and inplace_backward
LOGITS_ENTRIES = {
    (False, False): (torch.ops.flce.cross_entropy, given_logits.composite),
    (True, False): (torch.ops.flce.cross_entropy_metrics, given_logits.composite_metrics),
    (False, True): (torch.ops.flce.cross_entropy_, given_logits.composite_in_place),
    (True, True): (torch.ops.flce.cross_entropy_metrics_, given_logits.composite_metrics_in_place),
}


class LinearCrossEntropyMetrics(NamedTuple):
    """By-products of the loss; constants, no gradient flows through them."""

    token_accuracy: Tensor  # (), float32: share of the tokens not ignored whose target has the largest logit
    argmax: Tensor  # target's shape, int64: class of the largest logit, -1 at ignored tokens


def linear_cross_entropy(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D), or (V, d_1, ..., d_K, D)
    target: Tensor,  # (...), or (..., V) of probabilities
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
    gradient_threshold: float = 0.0,
    gradient_mode: str = "unbiased",
    gradient_seed: Tensor | None = None,  # ()
    return_metrics: bool = False,
    options: object = None,
) -> Tensor | tuple[Tensor, "LinearCrossEntropyMetrics"]:
    r"""Same as ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)``, without the (N, V) logits.

    Per token that is not ignored, with ``u = input @ linear_weight.T + linear_bias``::

        z    = logit_scale * u                    then, with softcap:  softcap * tanh(z / softcap)
        z    = z / temperature
        lse  = logsumexp_j z_j
        loss = token_weight * [ (1 - label_smoothing) * weight_y * (lse - z_y)
                                + label_smoothing / V * sum_j weight_j * (lse - z_j)
                                + z_loss * lse ** 2 ]

    With class probabilities q as target::

        loss = token_weight * sum_j weight_j * [(1 - label_smoothing) * q_j + label_smoothing / V] * (lse - z_j)

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast). For a
            K-dimensional loss (V, d_1, ..., d_K, D), a head for each position, which run one after the other;
            target, loss and token_weight are (..., d_1, ..., d_K) then, and linear_bias (V, d_1, ..., d_K).
        target: class indices in [0, V) or ``ignore_index``, (...), int64 or int32. Or class probabilities, (..., V) or
            (..., V, d_1, ..., d_K), of any floating dtype, not negative (that gives nan); they need not add up to 1,
            and are constants.
        linear_bias: (V,), in input's dtype.
        weight: class weights, (V,), as F.cross_entropy's; constants, they get no gradient.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of tokens not
            ignored, or by the sum of their class weights. "sum".
        ignore_index: target value that contributes neither loss nor gradient, whatever input holds there. None is -100,
            as torch's.
        label_smoothing: in [0, 1].
        softcap: bound on the logits' magnitude (Gemma 2), applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap (Cohere, Granite): a number, or a 0-d tensor (CLIP), which
            gets its gradient and is multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        z_loss: factor of the squared logsumexp (PaLM), inside the sum that "mean" divides.
        token_weight: factor per token, (...); it does not enter the denominator of "mean". Tokens of weight 0 are left
            out like ignored ones, unless token_weight gets a gradient or the metrics their argmax.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum": the number
            of target tokens in the whole batch under gradient accumulation or data parallelism.
            Over 0 the loss and its gradients are those of losses.sum() / normalizer.
        gradient_threshold: 0, or a probability from which on entries of softmax(z) - onehot(y) enter the gradients of
            input and linear_weight as they are: 2^-10, say. The loss and linear_bias's gradient stay exact. For a
            scalar loss of class indices, without label smoothing and softcap, not in float16, not of DTensors.
        gradient_mode: what becomes of an entry g below the threshold. "unbiased": with probability |g| / threshold it
            is threshold with g's sign, otherwise 0, so gradients have the right mean and some noise. "drop": 0.
        gradient_seed: 0-d int64 tensor on input's device, for "unbiased": the same seed keeps the same entries.
            Another one in every step, and on every rank that has other tokens.
        return_metrics: also return what the logits were used for, from the same pass and without a host sync. Not for
            probabilities, nor is ``z_loss``.
        options: torch.nn.LinearCrossEntropyOptions, for calls written for torch's function. Its chunk sizes bound
            memory as ``set_workspace`` does here, and have no effect; what would change the sums is refused.

    Returns:
        float32 (float64 for float64 input): shape () or, for "none", target's. In nats per token.
        With ``return_metrics`` a pair: that loss, and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``.

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        IndexError: a target outside [0, V); on CUDA a device-side assert instead, without a host sync.
        NotImplementedError: forward-mode or third derivatives; a gradient for ``weight`` or probabilities, and second
            derivatives of their loss; probabilities or a K-dimensional loss beside DTensors; what gradient_threshold
            does not go with, second derivatives and torch.func among it.

    Composability:
        torch.compile(fullgraph=True), torch.export, autocast, torch.func.grad / vmap, double backward, activation
        checkpointing, CUDA graphs. Gradients of a scalar loss are made during forward, in the same pass over the
        logits; in float16, under checkpointing, torch.func and reduction="none" backward makes them, from logits that
        forward retained (``set_workspace``) or that it makes again.

    Source:
        Memory idea: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024. See DESIGN.md.
    """
    check_torch_options(linear.OP, options, input.dtype)
    refuse_tensors(linear.OP, softcap=softcap, z_loss=z_loss, label_smoothing=label_smoothing)
    refuse_tensors(linear.OP, gradient_threshold=gradient_threshold)
    input, linear_bias, logit_scale, temperature = apply_learnt_scale(
        linear.OP, input, linear_bias, logit_scale, temperature, softcap
    )
    normalizer = normalizer_tensor(normalizer, input)
    tensors = (input, linear_weight, target, linear_bias, weight, token_weight, normalizer)
    if return_metrics:
        entry = entry_of(torch.ops.flce.linear_cross_entropy_metrics, linear.composite_metrics, *tensors)
    else:
        entry = entry_of(torch.ops.flce.linear_cross_entropy, linear.composite, *tensors)
    result = entry(
        input,
        linear_weight,
        target,
        linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=resolve_ignore_index(linear.OP, ignore_index, target),
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        z_loss=z_loss,
        token_weight=token_weight,
        normalizer=normalizer,
        gradient_threshold=gradient_threshold,
        gradient_mode=gradient_mode,
        gradient_seed=gradient_seed,
    )
    if not return_metrics:
        return result
    loss, token_accuracy, argmax = result
    return loss, LinearCrossEntropyMetrics(token_accuracy, argmax)


def cross_entropy(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...)
    *,
    weight: Tensor | None = None,  # (V,)
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,  # ()
    inplace_backward: bool = False,
    return_metrics: bool = False,
) -> Tensor | tuple[Tensor, "LinearCrossEntropyMetrics"]:
    r"""Same as ``F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())``, without a copy of the logits.

    For models that must have logits, and for heads that are not linear; ``linear_cross_entropy`` never holds them. The
    loss is that of its docstring with the given logits as ``u``.

    The gradient of a scalar loss is made in forward, in the same pass: each logit is read from memory once, and its
    gradient, in the logits' dtype, is written once.

    Args:
        logits: (..., V); float64, float32, bfloat16 or float16. What cannot be seen as (N, V), such as
            ``logits[:, :-1]`` of several sequences, is copied: shift the targets instead.
        target: class indices in [0, V) or ``ignore_index``, (...), int64 or int32.
        weight, reduction, ignore_index, label_smoothing, softcap, z_loss, token_weight, normalizer: as of
            ``linear_cross_entropy``.
        logit_scale, temperature: numbers; a learnt one is yours to multiply the logits with.
        inplace_backward: hands the logits over: their gradient may be written over them, so that no second matrix of
            their size exists. What they hold after the call is not defined. It is written in forward, where a scalar
            loss is differentiated, the logits are the result of an operation (no leaf, no input of a compiled graph, no
            retain_grad()) and all of their memory, and the gradient is made in forward (no float16, checkpoint or
            torch.func); elsewhere the logits stay.
            ``explain`` says which. Autograd raises where another operation had saved them (a tanh its result, say) or
            where something computed from them afterwards is differentiated.
        return_metrics: also return the accuracy and the argmax, from the same pass and without a host sync.

    Returns:
        float32 (float64 for float64 logits): shape () or, for "none", target's. In nats per token.
        With ``return_metrics`` a pair: that loss, and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``.

    Raises:
        ValueError, TypeError, IndexError: as of ``linear_cross_entropy``.
        NotImplementedError: second derivatives of a scalar loss whose gradient was made in forward; with
            reduction="none" derivatives of any order are right.
        RuntimeError: logits that were handed over had other readers, as above.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, activation checkpointing, CUDA graphs, DTensor
        with the tokens sharded. The logits are not kept for backward. In float16, under checkpointing, torch.func and
        for reduction="none" they are, and backward reads them again.
    """
    refuse_tensors(
        logits_plain.OP,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
    )
    normalizer = normalizer_tensor(normalizer, logits)
    op, body = LOGITS_ENTRIES[return_metrics, inplace_backward]
    entry = entry_of(op, body, logits, target, weight, token_weight, normalizer)
    result = entry(
        logits,
        target,
        weight=weight,
        reduction=reduction,
        ignore_index=resolve_ignore_index(logits_plain.OP, ignore_index, target),
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


class LinearLogProbs(NamedTuple):
    """Each of target's shape; float32 (float64 for float64 input), argmax int64."""

    log_probs: Tensor  # log p(target), nats; 0 at ignored tokens
    lse: Tensor  # logsumexp of the logits; 0 at ignored tokens
    entropy: Tensor | None  # of the distribution, nats; 0 at ignored tokens
    argmax: Tensor | None  # class of the largest logit, -1 at ignored tokens


def linear_log_probs(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    argmax: bool = False,
) -> LinearLogProbs:
    r"""Same as ``log_softmax(F.linear(input, linear_weight, linear_bias), -1)`` at target, without the (N, V) logits.

    With ``z`` the logits, scaled, capped and divided by the temperature as in ``linear_cross_entropy``, per token::

        lse      = logsumexp_j z_j
        log_prob = z_target - lse
        entropy  = lse - sum_j softmax(z)_j z_j

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: the tokens, (...), int64 or int32, in [0, V) or ``ignore_index``.
        linear_bias: (V,), in input's dtype.
        ignore_index: target value of tokens without results: 0, argmax -1, and no gradient. None is -100.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient and is
            multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        entropy: also return the entropy of each token's distribution.
        argmax: also return the class of the largest logit (the first of equals).

    Returns:
        ``LinearLogProbs(log_probs, lse, entropy, argmax)``, each of target's shape, None where not asked for.
        log_probs, lse and entropy are differentiable, float32 (float64 for float64 input).

    Raises:
        As ``linear_cross_entropy``. NotImplementedError: second derivatives through the entropy.

    Composability:
        As ``linear_cross_entropy``. 1 GEMM pass of 2NDV; with gradients 3 for tokens whose logits are
        retained (``set_workspace``), 4 for others. A vocabulary
        sharded over ranks exchanges 2 to 5 numbers per token. entropy and argmax cost nothing when not asked for.
    """
    refuse_tensors(log_probs.OP, softcap=softcap)
    input, linear_bias, logit_scale, temperature = apply_learnt_scale(
        log_probs.OP, input, linear_bias, logit_scale, temperature, softcap
    )
    entry = entry_of(torch.ops.flce.linear_log_probs, log_probs.composite, input, linear_weight, target, linear_bias)
    token_log_probs, lse, entropies, largest = entry(
        input,
        linear_weight,
        target,
        linear_bias,
        ignore_index=resolve_ignore_index(log_probs.OP, ignore_index, target),
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        entropy=entropy,
        argmax=argmax,
    )
    return LinearLogProbs(token_log_probs, lse, entropies if entropy else None, largest if argmax else None)


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
        token_weight: factor per token, (...); it does not enter the denominator of "mean". Differentiable. Tokens of
            weight 0 are left out like ignored ones, unless it gets a gradient.
        reduction: "none": divergence per token, 0 where ignored. "mean": sum over tokens divided by the number of
            tokens not ignored (F.kl_div's "batchmean" of flattened tokens), 0 without one, as distillation trainers
            have it (F.cross_entropy's is nan). "sum".
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
        kl_div.OP,
        beta=beta,
        softcap=softcap,
        temperature=temperature,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap,
    )
    if isinstance(logit_scale, Tensor) and teacher_logit_scale is None and teacher_probs is None:
        raise ValueError(
            f"{kl_div.OP}: logit_scale is a tensor, which the student's alone can be; pass the teacher's as a number: "
            "teacher_logit_scale=1.0, say"
        )
    input, linear_bias, logit_scale, _ = apply_learnt_scale(
        kl_div.OP, input, linear_bias, logit_scale, temperature, softcap
    )
    normalizer = normalizer_tensor(normalizer, input)
    operands = (input, linear_weight, teacher_input, teacher_weight, teacher_probs, linear_bias, teacher_bias)
    entry = entry_of(torch.ops.flce.linear_kl_div, kl_div.composite, *operands, target, token_weight, normalizer)
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
        ignore_index=resolve_ignore_index(kl_div.OP, ignore_index, target),
        token_weight=token_weight,
        reduction=reduction,
        normalizer=normalizer,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_softcap,
    )


def entry_of(op: torch._ops.OpOverloadPacket, body: Callable, *tensors: Tensor | None) -> Callable:
    """`op`, whose body autograd's key runs; in inference mode DTensor would see it first and refuse plain tensors."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return body if inference and any_dtensor(*tensors) else op
