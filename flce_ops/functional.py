"""The public functions: what the arguments mean, and the call of the entry operator.

linear_cross_entropy -> torch.ops.flce.linear_cross_entropy -> its body: flce_ops/entry/
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from flce_ops.entry import cross_entropy as linear
from flce_ops.entry import kl_div, log_probs, logits_plain, metrics, policy, policy_plain
from flce_ops.entry import logits as given_logits
from flce_ops.entry.argument_types import typed
from flce_ops.entry.arguments import resolve_ignore_index
from flce_ops.entry.first_classes import first_classes
from flce_ops.entry.learnt_scale import apply_learnt_scale, refuse_tensors
from flce_ops.entry.shifted_target import shifted_target
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


@typed
def linear_cross_entropy(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D), or (V, d_1, ..., d_K, D)
    target: Tensor,  # (...), (..., K) with target_weight, or (..., V) of probabilities
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
    target_weight: Tensor | None = None,  # (..., K)
    normalizer: Tensor | float | None = None,  # ()
    shift: bool = False,
    main_grad: Tensor | None = None,  # (V, D)
    gradient_threshold: float = 0.0,
    gradient_mode: str = "unbiased",
    gradient_seed: Tensor | None = None,  # ()
    return_metrics: bool | Sequence[str] = False,
    options: object = None,
) -> Tensor | tuple[Tensor, "LinearCrossEntropyMetrics | dict[str, Tensor]"]:
    r"""Same as ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)``, without the (N, V) logits.

    Per token that is not ignored, with ``u = input @ linear_weight.T + linear_bias``::

        z    = logit_scale * u                    then, with softcap:  softcap * tanh(z / softcap)
        z    = z / temperature
        lse  = logsumexp_j z_j
        loss = token_weight * [ (1 - label_smoothing) * weight_y * (lse - z_y)
                                + label_smoothing / V * sum_j weight_j * (lse - z_j)
                                + z_loss * lse ** 2 ]

    With several classes y_k a token and their weights q as target and target_weight (soft targets)::

        loss = token_weight * [ (1 - label_smoothing) * sum_k q_k * weight_yk * (lse - z_yk)
                                + label_smoothing / V * sum_j weight_j * (lse - z_j)
                                + z_loss * lse ** 2 ]

    With class probabilities q as target::

        loss = token_weight * sum_j weight_j * [(1 - label_smoothing) * q_j + label_smoothing / V] * (lse - z_j)

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast). For a
            K-dimensional loss (V, d_1, ..., d_K, D), a head for each position, which run one after the other;
            target, loss and token_weight are (..., d_1, ..., d_K) then, and linear_bias (V, d_1, ..., d_K).
        target: class indices in [0, V) or ``ignore_index``, (...), int64 or int32. With ``target_weight`` (..., K): K
            classes a token, of which those that are ``ignore_index`` count for nothing; a token without another is
            ignored. Or class probabilities, (..., V) or (..., V, d_1, ..., d_K), of any floating dtype, not negative
            (that gives nan); they need not add up to 1, and are constants.
        linear_bias: (V,), in input's dtype.
        weight: class weights, (V,), as F.cross_entropy's; constants, they get no gradient.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of tokens not
            ignored, or, of one class a token, by the sum of their class weights. "sum".
        ignore_index: target value that contributes neither loss nor gradient, whatever input holds there. None is -100,
            as torch's.
        label_smoothing: in [0, 1].
        softcap: bound on the logits' magnitude (Gemma 2), applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap (Cohere, Granite): a number, or a 0-d tensor (CLIP), which
            gets its gradient and is multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        z_loss: factor of the squared logsumexp (PaLM), inside the sum that "mean" divides.
        token_weight: factor per token, (...); it does not enter the denominator of "mean". Tokens of weight 0 are left
            out like ignored ones, unless token_weight gets a gradient or metrics are returned.
        target_weight: q, one for each class of target, (..., K), any floating dtype, not negative (that gives nan).
            They need not add up to 1 (a teacher's top K), equal classes of a token add up, 0 is fine, and what stands
            beside ``ignore_index`` is not read. Constants. A hard target beside soft ones is one more slot:
            ``torch.cat([target.unsqueeze(-1), classes], -1)`` with its weight beside theirs.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum": the number
            of target tokens in the whole batch under gradient accumulation or data parallelism.
            Over 0 the loss and its gradients are those of losses.sum() / normalizer.
        shift: target holds the labels of the same positions as input, (..., T): the token at position t is scored
            against the label at t + 1, as causal language models are, and the last one of each sequence is ignored; its
            loss is 0, its argmax -1. token_weight stays that of position t. Several sequences packed into one: label
            the first token of each ``ignore_index``. Nothing is copied but the labels. Not for probabilities, soft
            targets and K-dimensional losses, nor for labels whose sequences are sharded.
        main_grad: (V, D), contiguous, float32 (float64 for float64) or linear_weight's dtype: backward adds
            linear_weight's gradient to it, inside the GEMM and without rounding where it is float32, and autograd gets
            none: ``linear_weight.grad`` stays as it is. Forward leaves it alone. Megatron's ``weight.main_grad``; see
            docs/clients.md.
        gradient_threshold: 0, or a probability from which on entries of softmax(z) - onehot(y) enter the gradients of
            input and linear_weight as they are: 2^-10, say. The loss and linear_bias's gradient stay exact. For a
            scalar loss of class indices, without label smoothing and softcap, not in float16, not of DTensors.
        gradient_mode: what becomes of an entry g below the threshold. "unbiased": with probability |g| / threshold it
            is threshold with g's sign, otherwise 0, so gradients have the right mean and some noise. "drop": 0.
        gradient_seed: 0-d int64 tensor on input's device, for "unbiased": the same seed keeps the same entries.
            Another one in every step, and on every rank that has other tokens.
        return_metrics: also return by-products of the same pass, without a host sync: True for the accuracy and the
            argmax, or names. Of target's shape and, with ``p = softmax(z)``, in nats::

                "lse"               logsumexp_j z_j
                "entropy"           -sum_j p_j log p_j
                "log_sum_sq_probs"  log sum_j p_j ** 2
                "mean_logit"        mean_j z_j
                "z_loss"            z_loss * lse ** 2, before token_weight
                "argmax"            class of the largest logit, the first of equals; -1 at ignored tokens
                "is_top1"           whether target is the argmax, bool
                "token_accuracy"    (), float32: share of the tokens not ignored whose target is

            Constants, 0 at ignored tokens; docs/log_probs.md says what each costs. Not for probabilities, nor is
            ``z_loss``; with target_weight not the last three.
        options: torch.nn.LinearCrossEntropyOptions, for calls written for torch's function. Its chunk sizes bound
            memory as ``set_workspace`` does here, and have no effect; what would change the sums is refused.

    Returns:
        float32 (float64 for float64 input): shape () or, for "none", that of the tokens. In nats per token.
        With ``return_metrics=True`` a pair: that loss, and ``LinearCrossEntropyMetrics(token_accuracy, argmax)``; with
        names a pair of the loss and a dict of what they name.

    Raises:
        ValueError, TypeError: a shape, value or dtype that does not fit, by the argument's name.
        IndexError: a target outside [0, V); on CUDA a device-side assert instead, without a host sync.
        NotImplementedError: forward-mode or third derivatives; a gradient for ``weight``, ``target_weight`` or
            probabilities, and second derivatives of the latter's loss; probabilities or a K-dimensional loss beside
            DTensors; target_weight with a K-dimensional loss. main_grad under torch.func or create_graph=True, beside
            DTensors, for probabilities or a K-dimensional loss; gradient_threshold there, with main_grad
            and with target_weight.

    Composability:
        torch.compile(fullgraph=True), torch.export, autocast, torch.func.grad / vmap, double backward, activation
        checkpointing, CUDA graphs. Gradients of a scalar loss are made during forward, in the same pass over the
        logits; in float16, under checkpointing, torch.func, with main_grad and reduction="none" backward makes them,
        from logits that forward retained (``set_workspace``) or that it makes again.

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
    if shift:
        target = shifted_target(linear.OP, target, input, ignore_index)
    tensors = (input, linear_weight, target, linear_bias, weight, token_weight, normalizer, main_grad, target_weight)
    names = metrics.metric_names(linear.OP, return_metrics)
    asked: dict[str, bool] = {}
    if return_metrics is False:
        entry = entry_of(torch.ops.flce.linear_cross_entropy, linear.composite, *tensors)
    else:
        entry = entry_of(torch.ops.flce.linear_cross_entropy_metrics, linear.composite_metrics, *tensors)
        asked = metrics.statistics_for(names)._asdict()
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
        main_grad=main_grad,
        target_weight=target_weight,
        gradient_threshold=gradient_threshold,
        gradient_mode=gradient_mode,
        gradient_seed=gradient_seed,
        **asked,
    )
    if return_metrics is False:
        return result
    loss, *found = result
    by_name = metrics.by_name(names, found, z_loss)
    if return_metrics is True:
        return loss, LinearCrossEntropyMetrics(by_name["token_accuracy"], by_name["argmax"])
    return loss, by_name


@typed
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
    shift: bool = False,
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
            ``logits[:, :-1]`` of several sequences, is copied: pass ``shift=True`` instead.
        target: class indices in [0, V) or ``ignore_index``, (...), int64 or int32.
        weight, reduction, ignore_index, label_smoothing, softcap, z_loss, token_weight, normalizer, shift: as of
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
        with tokens or classes sharded. The logits are not kept for backward. In float16, under checkpointing,
        torch.func, with sharded classes and for reduction="none" they are, and backward reads them again.
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
    if shift:
        target = shifted_target(logits_plain.OP, target, logits, ignore_index)
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
    """One number a token, (...); float32 (float64 for float64 input), argmax int64."""

    log_probs: Tensor  # of target's shape, log p(target), nats; 0 where it is ignore_index
    lse: Tensor  # logsumexp of the logits; 0 at ignored tokens
    entropy: Tensor | None  # of the distribution, nats; 0 at ignored tokens
    argmax: Tensor | None  # class of the largest logit, -1 at ignored tokens
    tail_log_prob: Tensor | None = None  # log of the probability of all classes that target does not name, nats


@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    argmax: bool = False,
    tail: bool = False,
) -> LinearLogProbs: ...


@overload
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    argmax: bool = False,
    tail: bool = False,
    return_metrics: Sequence[str],
) -> tuple[LinearLogProbs, dict[str, Tensor]]: ...


@typed
def linear_log_probs(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...) or (..., K)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    shift: bool = False,
    entropy: bool = False,
    argmax: bool = False,
    tail: bool = False,
    return_metrics: Sequence[str] | None = None,
) -> LinearLogProbs | tuple[LinearLogProbs, dict[str, Tensor]]:
    r"""Same as ``log_softmax(F.linear(input, linear_weight, linear_bias), -1)`` at target, without the (N, V) logits.

    With ``z`` the logits, scaled, capped and divided by the temperature as in ``linear_cross_entropy``, per token::

        lse      = logsumexp_j z_j
        log_prob = z_target - lse
        entropy  = lse - sum_j softmax(z)_j z_j
        tail_log_prob = log(1 - sum_k softmax(z)_k), k over the distinct classes that target names for the token

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: the tokens, (...), int64 or int32, in [0, V) or ``ignore_index``. Or K classes of each, (..., K).
        linear_bias: (V,), in input's dtype.
        ignore_index: target value of tokens without results: 0, argmax -1, and no gradient. None is -100. Of K classes
            such a slot has log-probability 0, and a token of such slots alone is ignored.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient and is
            multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        shift: as of ``linear_cross_entropy``: position t has the log-probability of target's token t + 1.
        entropy: also return the entropy of each token's distribution.
        argmax: also return the class of the largest logit (the first of equals).
        tail: also return the log-probability of all other classes together, of those that target does not name. Where
            that is below the dtype's eps (log: -15.9 in float32), a rounding of the others, it stays there, and has no
            gradient.
        return_metrics: names of what else to return, constants: ``"log_sum_sq_probs"``, log sum_j softmax(z)_j ** 2,
            and ``"mean_logit"``, mean_j z_j. The result is a pair then.

    Returns:
        ``LinearLogProbs(log_probs, lse, entropy, argmax, tail_log_prob)``, log_probs of target's shape, the others one
        number a token, (...); None where not asked for. All but argmax are differentiable, float32 (float64 for float64
        input).
        With ``return_metrics`` a pair: that, and a dict of what it names, (...) each, 0 at ignored tokens.

    Raises:
        As ``linear_cross_entropy``. NotImplementedError: second derivatives through the entropy.

    Composability:
        As ``linear_cross_entropy``. 1 GEMM pass of 2NDV; with gradients 3 for tokens whose logits are
        retained (``set_workspace``), 4 for others. A vocabulary
        sharded over ranks exchanges 2 to 7 numbers per token, K - 1 more of K classes. What is not asked for costs
        nothing.
    """
    refuse_tensors(log_probs.OP, softcap=softcap)
    input, linear_bias, logit_scale, temperature = apply_learnt_scale(
        log_probs.OP, input, linear_bias, logit_scale, temperature, softcap
    )
    if shift:
        target = shifted_target(log_probs.OP, target, input, ignore_index)
    names = () if return_metrics is None else metrics.checked_names(log_probs.OP, return_metrics, metrics.OF_LOG_PROBS)
    entry = entry_of(torch.ops.flce.linear_log_probs, log_probs.composite, input, linear_weight, target, linear_bias)
    token_log_probs, lse, entropies, largest, *others, of_tail = entry(
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
        tail=tail,
        **{name: name in names for name in metrics.OF_LOG_PROBS},
    )
    found = LinearLogProbs(
        token_log_probs,
        lse,
        entropies if entropy else None,
        largest if argmax else None,
        of_tail if tail else None,
    )
    if return_metrics is None:
        return found
    by_name = dict(zip(metrics.OF_LOG_PROBS, others))
    return found, {name: by_name[name] for name in names}


class LinearPolicyResult(NamedTuple):
    """Loss of linear_policy_loss, and a by-product: no gradient flows through it."""

    loss: Tensor  # (), or target's shape with reduction="none"
    log_probs: Tensor  # target's shape: log p(target), nats; 0 at tokens that are ignored or left out by weight 0


@typed
def linear_policy_loss(
    input: Tensor,  # (..., D)
    linear_weight: Tensor,  # (V, D)
    target: Tensor,  # (...)
    advantages: Tensor,  # (...)
    old_log_probs: Tensor | None = None,  # (...)
    ref_log_probs: Tensor | None = None,  # (...)
    linear_bias: Tensor | None = None,  # (V,)
    *,
    objective: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    reduction: str = "mean",
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None,  # (...)
    normalizer: Tensor | float | None = None,  # ()
) -> LinearPolicyResult:
    r"""The token losses of PPO, GRPO, DAPO and CISPO with their KL term, without the (N, V) logits.

    Same as the formulas below on ``linear_log_probs(input, linear_weight, target, linear_bias).log_probs``, in 3 GEMM
    passes for loss and gradients. Per token that is not ignored, with A its advantage::

        r     = exp(log_prob - old_log_prob)
        clip  = min(max(r, 1 - clip_low), 1 + clip_high)

        "ppo"    loss = max(-A * r, -A * clip)     with dual_clip, where A < 0: at most -A * dual_clip
        "cispo"  loss = -clip * A * log_prob       the clipped ratio is a constant

        loss  = token_weight * (loss + beta * KL)
        KL    of d = log_prob - ref_log_prob:  "k1": d      "k2": d ** 2 / 2      "k3": exp(-d) + d - 1

    Args:
        input: hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the head, (V, D), in input's dtype (any floating dtype under autocast).
        target: the tokens that were sampled, (...), int64 or int32, in [0, V) or ``ignore_index``.
        advantages: (...), a constant. A weight of the objective alone, such as the correction for another sampler's
            probabilities, is a factor of it.
        old_log_probs: of the policy that is to be compared with, (...), a constant; None for this policy itself: r is 1
            then, with its gradient.
        ref_log_probs: of the reference model, (...), a constant; read where beta is not 0.
        linear_bias: (V,), in input's dtype.
        objective: "ppo" (also GRPO's, Dr. GRPO's and DAPO's) or "cispo".
        clip_low: the ratio's lower bound is 1 - clip_low; ``math.inf`` for none. Not negative, like the next.
        clip_high: the upper bound is 1 + clip_high.
        dual_clip: of "ppo", bound on the ratio where the advantage is negative; greater than 1.
        beta: factor of the KL term; 0 for none.
        kl_estimator: "k1", "k2" or "k3" (Schulman, "Approximating KL divergence", 2020); differentiated as written.
        reduction: "none": loss per token, 0 where ignored. "mean": sum over tokens divided by the number of tokens not
            ignored, nan without one. "sum".
        ignore_index: target value of tokens that do not count, whatever the other arguments hold there. None is -100.
        softcap: bound on the logits' magnitude, applied after ``logit_scale``.
        logit_scale: factor on the logits before the cap: a number, or a 0-d tensor, which gets its gradient and is
            multiplied into input and linear_bias.
        temperature: divides the logits behind the cap, as sampling does; a number, or without softcap a 0-d tensor.
        token_weight: factor per token, (...), on the objective and on the KL term: 1 / the completion's length for
            GRPO's mean of means. It does not enter the denominator of "mean". Differentiable. Tokens of weight 0 are
            left out like ignored ones, unless it gets a gradient.
        normalizer: number or 0-d tensor that divides the sum instead of the count, for "mean" and "sum".

    Returns:
        ``LinearPolicyResult(loss, log_probs)``; float32 (float64 for float64 input). log_probs are constants, for the
        share of clipped tokens or an estimate of the KL; tokens of weight 0 are among them only where token_weight may
        get a gradient, as under torch.func, so multiply by it before you average.

    Raises:
        ValueError, TypeError, IndexError: as of ``linear_cross_entropy``; an objective of whole sequences (GSPO, DPO),
            by its name.
        NotImplementedError: advantages, old_log_probs or ref_log_probs that require a gradient (detach them);
            forward-mode or third derivatives.

    Composability:
        torch.compile(fullgraph=True), autocast, torch.func.grad / vmap, double backward, activation checkpointing, CUDA
        graphs, DTensor. Gradients of a scalar loss are made during forward, in the same pass over the logits; in
        float16, under checkpointing, torch.func, reduction="none" and over a sharded vocabulary backward makes them, as
        those of ``linear_log_probs``. Where a ratio overflows the loss is that of the formula; the gradient of a token
        beyond its bound is 0 all the same.

    Source:
        Schulman et al., "Proximal Policy Optimization Algorithms", 2017; Shao et al., "DeepSeekMath", 2024 (GRPO); Yu
        et al., "DAPO", 2025; MiniMax, "MiniMax-M1", 2025 (CISPO); Ye et al., "Mastering Complex Control in MOBA
        Games", 2020 (dual clip). See docs/policy_loss.md.
    """
    op = policy_plain.OP
    refuse_tensors(op, softcap=softcap, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, beta=beta)
    input, linear_bias, logit_scale, temperature = apply_learnt_scale(
        op, input, linear_bias, logit_scale, temperature, softcap
    )
    normalizer = normalizer_tensor(normalizer, input)
    tensors = (input, linear_weight, target, advantages, old_log_probs, ref_log_probs, linear_bias)
    entry = entry_of(torch.ops.flce.linear_policy_loss, policy.composite, *tensors, token_weight, normalizer)
    result = entry(
        *tensors,
        objective=objective,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        beta=beta,
        kl_estimator=kl_estimator,
        reduction=reduction,
        ignore_index=resolve_ignore_index(op, ignore_index, target),
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        token_weight=token_weight,
        normalizer=normalizer,
    )
    return LinearPolicyResult(*result)


@typed
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
    vocab_size: int | None = None,
    shift: bool = False,
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
        vocab_size: how many classes there are, where the student's or the teacher's vocabulary is padded: those from
            vocab_size on have no probability on either side, whatever the weights hold there, and gradient 0 (what
            teacher_probs has there is left out, not spread over the others). Then linear_weight, teacher_weight and
            teacher_probs may differ in V. Nothing is copied but the gradient of a longer linear_weight, into one of all
            its rows. Not with DTensors.
        shift: as of ``linear_cross_entropy``: position t is left out where label t + 1 is ``ignore_index``, and so is
            the last one of each sequence.

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
    if vocab_size is not None:
        linear_weight, linear_bias, teacher_weight, teacher_bias, teacher_probs = first_classes(
            kl_div.OP, vocab_size, linear_weight, linear_bias, teacher_weight, teacher_bias, teacher_probs
        )
    if shift:
        target = shifted_target(kl_div.OP, target, input, ignore_index)
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
