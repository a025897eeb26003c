"""The body of the entry operator flce::linear_kl_div. It flattens the tokens, chooses the path, and reduces the N
divergences in ATen. The same operators compute the loss of class probabilities.

If the vocabulary is sharded, ranks exchange O(N) numbers inside the operators (flce_ops/math/statistics.py). Logits and
weights do not move. The teacher's weight is sharded as the student's is.
"""

import torch
from torch import Tensor

from ..distributed import OneRank
from ..math.options import KlDivOperands, KlDivOptions, LogitNumbers, Number, accumulation_dtype, logit_options, scalar
from ..math.token_weights_and_denominator import mean_denominator, row_factor, weighted_sum, weightless
from ..meta.arguments import CrossEntropy, KlDiv, KlDivForward, KlDivWithGrad
from ..objectives.divergence import KINDS, smoothed_and_weighted
from ..ops.paths import gradients_wanted, loss_facts, needs_gradient, path_of_loss
from ..support.sizes import known_only_when_it_runs
from .arguments import FROM_DATA, check_arguments, check_divergence, check_ranges
from .loss import layout_of_call

# N tokens, D and E hidden sizes of student and teacher, V vocabulary

OP = "linear_kl_div"
NUMBERS = ("softcap", "teacher_softcap", "logit_scale", "teacher_logit_scale", "temperature")


def composite(call: KlDiv) -> Tensor:
    """Body of torch.ops.flce.linear_kl_div."""
    check_ranges(OP, NUMBERS, (getattr(call, name) for name in NUMBERS))
    kind = resolve_kind(call.kind, call.beta)
    layout = layout_of_call(OP, call)
    operands = KlDivOperands._make([*(getattr(call, name) for name in KlDivOperands._fields[:-1]), None])
    check_divergence(OP, call, operands)
    operands = flatten_tokens(layout, operands, call.target, call.ignore_index)
    options = kl_div_options(call, kind)._replace(**layout.sharing())
    token_weight, denominator = layout.per_token(call.token_weight), None
    if call.reduction != "none":
        normalizer = layout.number(call.normalizer)
        valid = operands.valid
        if valid is None:
            valid = torch.ones(operands.input.shape[0], dtype=torch.bool, device=operands.input.device)
        denominator = mean_denominator(call.reduction, normalizer, valid, accumulation_dtype(operands.input.dtype))
        if denominator is not None and normalizer is None:
            denominator = layout.sum_over_tokens(denominator).clamp(min=1.0)  # the mean over no token is 0
    operands, token_weight = weigh_tokens(operands, token_weight, denominator)
    return reduced(layout, call.reduction, operands, options, token_weight, denominator)


def kl_div_options(call: KlDiv, kind: str) -> KlDivOptions:
    input, temperature = call.input, call.temperature
    numbers = LogitNumbers(call.softcap, call.logit_scale, temperature)
    student = logit_options(numbers, input, learnt=call.learnt_scale)
    teacher_scale = call.logit_scale if call.teacher_logit_scale is None else call.teacher_logit_scale
    teacher_like = input if call.teacher_input is None else call.teacher_input
    teacher_numbers = LogitNumbers(call.teacher_softcap, teacher_scale, temperature)
    teacher = logit_options(teacher_numbers, teacher_like, "teacher_")
    return KlDivOptions(
        kind=kind,
        beta=scalar(call.beta, input) if kind == "jsd" else None,
        **student._asdict(),
        teacher_logit_scale=teacher.logit_scale,
        teacher_softcap=teacher.softcap,
        batch_invariant=call.batch_invariant,
    )


def resolve_kind(kind: str, beta: Number) -> str:
    """The kind to compute. At beta = 0 and 1, "jsd" is 0 by its formula. It then stands for the divergence to which jsd
    / beta or jsd / (1 - beta) tends: "forward" or "reverse".
    """
    if kind not in KINDS:
        raise ValueError(f"{OP}: expected kind to be one of {', '.join(KINDS)}, got {kind!r}")
    if known_only_when_it_runs(beta):
        raise ValueError(FROM_DATA.format(op=OP, name="beta"))
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"{OP}: expected beta in [0, 1], got {beta}")
    if kind == "jsd" and beta in (0.0, 1.0):
        return "reverse" if beta else "forward"
    return kind


def flatten_tokens(
    layout: OneRank, operands: KlDivOperands, target: Tensor | None = None, ignore_index: int = -100
) -> KlDivOperands:
    """Flattens (..., D) to this rank's (N, D), and finds the valid tokens."""
    layout.measure(operands.input, operands.linear_weight.shape[0])
    target = layout.per_token(target)
    of_tokens = {name: layout.rows(getattr(operands, name)) for name in ("input", "teacher_input", "teacher_probs")}
    names = ("linear_weight", "linear_bias", "teacher_weight", "teacher_bias")
    of_classes = {name: layout.per_class(getattr(operands, name)) for name in names}
    return KlDivOperands(**of_tokens, **of_classes, valid=None if target is None else target != ignore_index)


def weigh_tokens(
    operands: KlDivOperands,
    token_weight: Tensor | None,  # (N,)
    denominator: Tensor | None,  # ()
) -> tuple[KlDivOperands, Tensor]:
    """Marks tokens of weight 0 as not valid; the denominator still counts them. Also returns the weights, (N,)."""
    input = operands.input
    dtype = accumulation_dtype(input.dtype)
    if token_weight is None:
        return operands, torch.ones(input.shape[0], dtype=dtype, device=input.device)
    token_weight = token_weight.to(dtype)
    out = weightless(token_weight, row_factor(operands.valid, token_weight, denominator))
    if out is None:
        return operands, token_weight
    return operands._replace(valid=~out if operands.valid is None else operands.valid & ~out), token_weight


def reduced(
    layout: OneRank,
    reduction: str,
    operands: KlDivOperands,
    options: KlDivOptions,
    token_weight: Tensor,  # (N,)
    denominator: Tensor | None,  # ()
) -> Tensor:  # () or (...)
    """The loss. If it is a scalar, gradients that are wanted are made in the same pass."""
    factor = row_factor(operands.valid, token_weight, denominator)
    facts = loss_facts(operands.input, operands.linear_weight, operands.linear_bias)
    if reduction != "none" and path_of_loss("a scalar loss", facts) != "recompute":
        asked = gradients_wanted(operands), needs_gradient(options.logit_scale)
        loss, divergence, *_ = KlDivWithGrad.applied([*operands, factor, *options, *asked])
    else:
        divergence = KlDivForward.applied([*operands, *options])[0]
        if reduction == "none":
            return layout.result(factor * divergence)
        loss = (factor * divergence).sum()
    return layout.quotient(loss, weighted_sum(operands.valid, token_weight, divergence), denominator)


def loss_of_probabilities(call: CrossEntropy) -> Tensor:  # () or (...)
    """The loss of targets that are class probabilities, as in F.cross_entropy: a kind of divergence of its own, whose
    formula is in flce_ops/objectives/divergence.py.

    The loss of a token is nan if its q has a negative entry. The mean divides by the number of all tokens: neither
    ignore_index nor class weights change its denominator.
    """
    layout = OneRank()
    check_arguments(call)
    input = call.input
    student = (input, call.linear_weight, call.linear_bias)
    p = smoothed_and_weighted(call.target, call.weight, call.numbers.label_smoothing, accumulation_dtype(input.dtype))
    operands = flatten_tokens(layout, KlDivOperands(*student, None, None, None, p, None))
    logits = logit_options(call.numbers, input, learnt=call.learnt_scale)
    options = KlDivOptions(kind="cross_entropy", **logits._asdict(), batch_invariant=call.batch_invariant)
    denominator = denominator_of(call, operands.input.shape[0])
    operands, token_weight = weigh_tokens(operands, layout.per_token(call.token_weight), denominator)
    token_weight = torch.where(call.target.detach().amin(-1).flatten() < 0.0, torch.nan, token_weight)
    return reduced(layout, call.reduction, operands, options, token_weight, denominator)


def denominator_of(call: CrossEntropy, tokens: int) -> Tensor | None:  # ()
    if call.normalizer is not None:
        return call.normalizer.to(accumulation_dtype(call.input.dtype))
    return scalar(1.0, call.input) * tokens if call.reduction == "mean" else None
