"""The loss of targets that are class probabilities, as F.cross_entropy takes them, without the (N, V) logits.

The first of the two sums of flce_ops/objectives/class_probabilities.py is what linear_kl_div's operators compute for
any p >= 0, its gradient too; the second is a constant. The mean divides by all tokens: ignore_index and the class
weights are not in its denominator.
"""

from torch import Tensor

from flce_ops.entry.arguments import OP, check_arguments
from flce_ops.entry.kl_div_plain import flatten_tokens, row_divergences, weigh_tokens, weighted_loss
from flce_ops.entry.schemas import CrossEntropy
from flce_ops.math.kl_div_arguments import KlDivOperands, KlDivOptions
from flce_ops.math.precision import accumulation_dtype
from flce_ops.math.reduction import quotient, row_factor, weighted_sum
from flce_ops.math.scalars import logit_options, scalar
from flce_ops.objectives.class_probabilities import smoothed_and_weighted, sums_of_xlogx
from flce_ops.ops.autocast import autocast_head
from flce_ops.support.dtensor import any_dtensor

# N tokens, D hidden, V vocabulary


def loss_of_probabilities(call: CrossEntropy, metrics: bool) -> Tensor:  # () or (...)
    if metrics:
        raise NotImplementedError(
            f"{OP}: return_metrics is not implemented for a target of class probabilities, which names no class; "
            "linear_log_probs(..., argmax=True) finds the largest logit"
        )
    if any_dtensor(*call.values()):
        raise NotImplementedError(
            f"{OP}: a target of class probabilities with DTensors is not implemented; pass plain tensors throughout, "
            "or the model that makes them to linear_kl_div as DTensors"
        )
    autocast_head(call)
    check_arguments(call)
    input, shape = call.input, call.input.shape[:-1]
    student = (input, call.linear_weight, call.linear_bias)
    operands = flatten_tokens(
        KlDivOperands(
            *student,
            None,
            None,
            None,
            smoothed_and_weighted(call.target, call.weight, call.numbers.label_smoothing),
            None,
        ),
        None,
        -100,
    )
    options = KlDivOptions(**logit_options(call.numbers, input)._asdict())
    denominator = denominator_of(call, operands.input.shape[0])
    operands, token_weight = weigh_tokens(operands, call.token_weight, denominator)
    constant = sums_of_xlogx(operands.teacher_probs, accumulation_dtype(input.dtype))
    factor = row_factor(operands.valid, token_weight, denominator)
    if call.reduction == "none":
        return (row_divergences(operands, options, factor) - factor * constant).reshape(shape)
    loss, total = weighted_loss(operands, options, token_weight, denominator)
    loss = loss - (factor * constant).sum()
    return quotient(loss, total - weighted_sum(operands.valid, token_weight, constant), denominator)


def denominator_of(call: CrossEntropy, tokens: int) -> Tensor | None:  # ()
    if call.normalizer is not None:
        return call.normalizer.to(accumulation_dtype(call.input.dtype))
    return scalar(1.0, call.input) * tokens if call.reduction == "mean" else None
