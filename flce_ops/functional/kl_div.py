"""linear_kl_div: what its arguments mean."""

import torch
from torch import Tensor

from flce_ops.entry import kl_div
from flce_ops.entry.argument_types import typed
from flce_ops.entry.arguments import ReductionName, resolve_ignore_index
from flce_ops.entry.first_classes import first_classes
from flce_ops.entry.learnt_scale import apply_learnt_scale
from flce_ops.entry.shifted_target import shifted_target
from flce_ops.functional.entry_of import entry_of
from flce_ops.math.scalars import normalizer_tensor
from flce_ops.objectives.divergence import Kind
from flce_ops.support import rank_check

# N tokens, D and E hidden, V vocabulary


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
    kind: Kind = "forward",
    beta: float = 0.5,
    target: Tensor | None = None,  # (...)
    ignore_index: int | None = -100,
    token_weight: Tensor | None = None,  # (...)
    reduction: ReductionName = "mean",
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
        "tv"       total variation, sum |p - q| / 2
        "nla"      -log(sum min(p, q)), negative log-acceptance

    Args:
        input: the student's hidden states, (..., D); float64, float32, bfloat16 or float16.
        linear_weight: weight of the student's head, (V, D), in input's dtype (any floating dtype under autocast).
        teacher_input: the teacher's hidden states, (..., E): as many tokens; E need not be D, nor the dtype input's.
        teacher_weight: weight of the teacher's head, (V, E), in teacher_input's dtype; the vocabulary is the student's.
        teacher_probs: probabilities, (..., V), instead of the pair; exact zeros are fine. Where they do not add up to
            1, such as a truncated top-k, value and gradient are those of the sums above.
        linear_bias, teacher_bias: (V,).
        kind: "forward", "reverse", "jsd", "tv" or "nla". Where p = q, "tv" has the middle of its subgradients, and so
            has "nla".
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
        float32 (float64 for float64 input): shape () or, for "none", (...). In nats per token. Inf, with a gradient of
        nan, where the first distribution has probability on a class to which the second gives exactly 0 (teacher_probs
        under "reverse"). A class to which both give 0 has no part in value or gradient: 0 log (0 / 0) = 0, also where
        the student's 0 is a smaller number rounded. F.kl_div of the logits makes nan of such a class.

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
    if rank_check.wanted():
        rank_check.check_ranks(kl_div.OP, locals())
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
