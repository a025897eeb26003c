"""The loss of targets that are class probabilities, as in F.cross_entropy, without the (N, V) logits.

linear_kl_div's operators compute it, as its own kind. flce_ops/objectives/class_probabilities.py has the formula.
The loss of a token is nan if its q has a negative entry. The mean divides by the number of all tokens: neither
ignore_index nor class weights change its denominator.
"""

import torch
from torch import Tensor

from ..distributed.one_rank import OneRank
from ..math.kl_div_arguments import KlDivOperands, KlDivOptions
from ..math.options import logit_options, scalar
from ..math.precision import accumulation_dtype
from ..math.reduction import quotient, row_factor
from ..objectives.class_probabilities import smoothed_and_weighted
from .arguments import OP, check_arguments
from .kl_div import flatten_tokens, row_divergences, weigh_tokens, weighted_loss
from .schemas import CrossEntropy
from .token_temperature import temperature_of_tokens

# N tokens, D hidden, V vocabulary


def loss_of_probabilities(call: CrossEntropy) -> Tensor:  # () or (...)
    layout = OneRank()
    check_arguments(call)
    input = call.input
    student = (input, call.linear_weight, call.linear_bias)
    p = smoothed_and_weighted(call.target, call.weight, call.numbers.label_smoothing, accumulation_dtype(input.dtype))
    operands = flatten_tokens(layout, KlDivOperands(*student, None, None, None, p, None))
    logits = logit_options(call.numbers, input, temperature_of_tokens(OP, call, layout, None))
    options = KlDivOptions(kind="cross_entropy", **logits._asdict(), batch_invariant=call.batch_invariant)
    denominator = denominator_of(call, operands.input.shape[0])
    operands, token_weight = weigh_tokens(operands, layout.per_token(call.token_weight), denominator)
    token_weight = torch.where(call.target.detach().amin(-1).flatten() < 0.0, torch.nan, token_weight)
    if call.reduction == "none":
        return layout.result(row_divergences(operands, options, row_factor(operands.valid, token_weight, denominator)))
    return quotient(*weighted_loss(operands, options, token_weight, denominator), denominator)


def denominator_of(call: CrossEntropy, tokens: int) -> Tensor | None:  # ()
    if call.normalizer is not None:
        return call.normalizer.to(accumulation_dtype(call.input.dtype))
    return scalar(1.0, call.input) * tokens if call.reduction == "mean" else None
