"""How a loss of tokens is computed, for every source of logits, objective and layout.

    layout_of_call                        plain tensors, or DTensors; refuses combinations that are not implemented
    loss_of_tokens -> from_forward        reduction="none"
                   -> with_grad           a training step's loss, divided by the operator
                   -> with_grad | from_forward       another scalar loss, reduced in ATen

An objective brings two functions. from_forward computes the losses of tokens in differentiable ATen, from the row
numbers that a forward operator returned. with_grad calls an operator that makes a scalar loss and its gradients in one
pass.

The numbers of rows come from linear_cross_entropy_forward, which computes logits and discards them, or reads given
ones. If ranks share the vocabulary, each rank calls it, and one exchange follows: vocab_parallel.py.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from ..distributed import OneRank, any_dtensor
from ..distributed.vocab_parallel import vocab_parallel_rows
from ..math.options import (
    LogitOptions,
    Operands,
    Statistics,
    TokenLosses,
    TokenStatistics,
    accumulation_dtype,
    beside_topk,
    logit_options,
    scalar,
)
from ..math.statistics import Rows, asked_of_rows
from ..math.token_weights_and_denominator import Reduction, denominator_of, row_factor, weighted_sum, without_weightless
from ..meta.arguments import (
    CrossEntropy,
    CrossEntropyMetrics,
    Forward,
    LogitsCrossEntropy,
    LogProbs,
    PolicyLoss,
    TokenLoss,
)
from ..meta.call import Arguments
from ..objectives.cross_entropy import LossOptions, loss_options, losses_of_rows
from ..ops.paths import gradients_wanted, needs_gradient
from ..support.refusals import refuse
from ..support.sizes import SYMBOLIC
from ..support.torch_private import differentiated, functorch_is_active

# N tokens, V vocabulary

COUNTED, NOTHING = Reduction(None), TokenStatistics()
NONE_ASKED, NO_LOSS_OPTIONS, NO_LOGIT_OPTIONS = Statistics(), LossOptions(), LogitOptions()
Call = CrossEntropy | LogitsCrossEntropy | TokenLoss | PolicyLoss
Found = Sequence[Tensor | None]  # (N,) each, the other requested results
# Returns losses (N,), 0 for ignored tokens.
FromForward = Callable[[TokenLosses], tuple[Tensor, Found]]
# Returns the loss () with its gradients, and the losses.
FromWithGrad = Callable[[TokenLosses, Reduction], tuple[Tensor, Tensor, Found]]


def wants_gradient(call: Any) -> bool:
    return any(gradients_wanted(call))


# present if the argument is given
GIVEN = ("target_weight", "teacher_probs", "main_grad", "gradient_class_order")


def features_of(call: Any) -> set[str]:
    """The features that follow from the arguments alone. "sharded vocabulary" depends on the layout: the caller adds
    it.
    """
    values, found = vars(call), set()
    for name in GIVEN:
        if values.get(name) is not None:
            found.add(name)
    if "torch.distributed.tensor" in sys.modules:
        if any_dtensor(*values.values(), *values.get("tokens", ()), *values.get("tensors", ())):
            found.add("DTensors")
    if functorch_is_active():
        found.add("torch.func")
    if isinstance(call, CrossEntropy) and call.linear_weight.dim() > 2:
        found.add("positions")
    if isinstance(call, CrossEntropy) and call.target.is_floating_point():
        found.add("class probabilities")
    if isinstance(call, CrossEntropyMetrics) and any(call.statistics):
        found |= {"metrics", "argmax"} if call.statistics.argmax else {"metrics"}
    if "sparse" in values and call.sparse.gradient_threshold and wants_gradient(call):
        found.add("sparse gradient")
    if values.get("learnt_scale") is not None and needs_gradient(values["learnt_scale"]):
        found.add("learnt scale")
    if values.get("batch_invariant"):
        found |= {"batch_invariant", "a CPU"} if call.input.device.type == "cpu" else {"batch_invariant"}
    return found


def layout_of_call(op: str, call: Arguments) -> OneRank:
    """The layout of the call's tensors."""
    features = features_of(call)
    if features:
        refuse(op, call, features)
    layout = OneRank()
    if "DTensors" in features:
        from ..distributed.layout import layout_of_arguments  # only users of DTensors import torch.distributed.tensor

        named = dict(zip(call.index, call.values()))
        named |= {f"tensors[{place}]": tensor for place, tensor in enumerate(named.pop("tensors", ()))}
        layout = layout_of_arguments(op, named)
        if layout.splits_vocabulary:
            refuse(op, call, features | {"sharded vocabulary"})
    return layout


def token_losses(
    op: str,
    layout: OneRank,
    call: Call | LogProbs,
    operands: Operands,
    asked: Statistics = NONE_ASKED,
    **others: Any,
) -> TokenLosses:
    input, values, numbers = operands[0], vars(call), call.numbers
    learnt, loss, logits = values.get("learnt_scale"), NO_LOSS_OPTIONS, NO_LOGIT_OPTIONS
    if learnt is not None or has_effect(numbers):
        loss, logits = loss_options(numbers, input), logit_options(numbers, input, learnt=learnt)
        others["scale_gradient"] = needs_gradient(logits.logit_scale)
    for name in ("main_grad", "sparse", "batch_invariant"):
        if name in values:
            others[name] = values[name]
    return TokenLosses(operands, call.ignore_index, loss, logits, asked, **others)


def has_effect(numbers: Any) -> bool:
    """Whether a number is not at its default. A number that is symbolic in a traced graph counts as such."""
    for name, number in zip(numbers._fields, numbers):
        if isinstance(number, SYMBOLIC) or number != numbers._field_defaults[name]:
            return True
    return False


def rows_of(layout: OneRank, problem: TokenLosses) -> Rows:
    if layout.splits_vocabulary:
        return vocab_parallel_rows(layout, problem)
    return Rows.of_forward(Forward.applied(Forward.like(problem, **asked_of_rows(problem))))


def losses_and_statistics(layout: OneRank, problem: TokenLosses) -> tuple[Tensor, TokenStatistics]:
    rows = rows_of(layout, problem)
    losses = losses_of_rows(problem, layout.num_classes, rows)
    return losses, rows.statistics(problem.statistics)


def loss_of_tokens(
    layout: OneRank,
    call: Call,
    problem: TokenLosses,
    from_forward: FromForward,
    with_grad: FromWithGrad | None,  # None if backward makes the gradients, or none are wanted
) -> tuple[Tensor, Found]:
    """Returns the loss, () or (...), and the other requested results, (...)."""
    operands, scalar_loss = problem.operands, call.reduction != "none"
    token_weight, normalizer = call.token_weight, call.normalizer
    loss: Tensor | None
    constant = token_weight is None and (normalizer is None or not differentiated(normalizer))
    if scalar_loss and with_grad is not None and constant and not layout.is_mesh:
        # all valid tokens have the same factor, and its gradient is not wanted
        loss, _, found = with_grad(problem, reduction_in_operator(layout, call, problem))
    else:
        dtype = accumulation_dtype(operands[0].dtype)
        if token_weight is not None:
            token_weight = cast(Tensor, layout.per_token(token_weight)).to(dtype)
        denominator = denominator_of(layout, call, problem) if scalar_loss else None
        learnt = problem.logits.logit_scale
        wants_gradient = scalar_loss and differentiated(*operands, token_weight, denominator, learnt)
        if token_weight is None and not wants_gradient:
            losses, found = from_forward(problem)
            loss, total = None, losses.sum() if scalar_loss else losses
        else:
            factor = row_factor(problem.valid, token_weight, denominator, dtype)
            counting = without_weightless(layout, problem, token_weight, factor)
            if scalar_loss and with_grad is not None:
                loss, losses, found = with_grad(counting, Reduction(factor))
            else:
                losses, found = from_forward(counting)
                loss = (factor * losses).sum() if wants_gradient else None
            if token_weight is not None and not any(problem.statistics):
                left_out = factor.detach() == 0.0  # the others were computed if token_weight gets a gradient
                found = tuple(r if r is None else r.masked_fill(beside_topk(left_out, r), 0.0) for r in found)
            total = weighted_sum(problem.valid, token_weight, losses) if scalar_loss else losses * factor
        loss = layout.quotient(loss, total, denominator) if scalar_loss else layout.result(total)
    return loss, found if found is NOTHING else [None if of is None else layout.result(of) for of in found]


def reduction_in_operator(layout: OneRank, call: Call, problem: TokenLosses) -> Reduction:
    """The reduction of tokens with equal factors. The operator itself counts the valid tokens, because counting in ATen
    takes seven launches.
    """
    input = problem.operands[0]
    weighted = problem.operands.weight is not None and problem.target_weight is None
    if call.reduction == "mean" and call.normalizer is None and not weighted:
        return COUNTED
    if call.normalizer is not None and call.normalizer.device != input.device:  # a number becomes a tensor on the CPU
        return Reduction(None, scalar(1.0, input) * call.normalizer)
    denominator = denominator_of(layout, call, problem)
    return Reduction(None, scalar(1.0, input) if denominator is None else denominator)
