"""cross_entropy of given logits: the bodies of flce::cross_entropy, ..._metrics, and their variants that may overwrite
the logits.

composite -> losses_with_grad       ..._with_grad_ | ..._with_grad
          -> losses_and_statistics  ..._forward, then differentiable ATen; the only way if ranks share the classes

DTensors are never overwritten.

Autocast changes nothing: for logits of any dtype the loss is float32 (float64 for float64), as F.cross_entropy's is
under autocast.
"""

import math
from functools import partial

from torch import Tensor

from ..math.options import LogitOperands, Statistics, TokenLosses, TokenStatistics
from ..math.reduction import Reduction
from ..meta.arguments import LogitsWithGrad, LogitsWithGradInPlace
from ..ops.call_facts import given_logits_facts
from ..ops.cross_entropy_autograd import remember_handed_over
from ..ops.paths import path_of_loss
from .arguments import check_logits
from .loss import layout_of_call, loss_of_tokens, losses_and_statistics, token_losses
from .metrics import accuracy_and_top1
from .schemas import LogitsCrossEntropy

# N tokens, V vocabulary

OP = "cross_entropy"
OPERATORS = {"in place": LogitsWithGradInPlace, "one pass": LogitsWithGrad}  # otherwise backward makes the gradient


def metrics(call: LogitsCrossEntropy, handed_over: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, token_accuracy, argmax)."""
    loss, argmax = composite(call, handed_over, argmax=True)
    assert argmax is not None
    return loss, accuracy_and_top1(argmax, call.target, call.ignore_index)[0], argmax


def composite(call: LogitsCrossEntropy, handed_over: bool, argmax: bool = False) -> tuple[Tensor, Tensor | None]:
    layout = layout_of_call(OP, call)
    check_logits(OP, call)
    layout.measure(call.logits, call.logits.shape[-1])
    logits, copied = rows_of(layout.columns(call.logits))
    operands = LogitOperands(logits, layout.per_token(call.target), layout.whole(call.weight))
    problem = token_losses(OP, layout, call, operands, Statistics(argmax=argmax))
    operator, own = None, call.logits if handed_over and not copied and not layout.is_mesh else None
    if call.reduction != "none" and not layout.splits_vocabulary:
        facts = given_logits_facts(logits, (handed_over or copied) and not layout.is_mesh)
        operator = OPERATORS.get(path_of_loss("a scalar loss of given logits", facts))
    with_grad = None if operator is None else partial(losses_with_grad, operator, own)
    loss, (largest, *_) = loss_of_tokens(layout, call, problem, partial(losses_and_statistics, layout), with_grad)
    return loss, largest


def rows_of(logits: Tensor) -> tuple[Tensor, bool]:
    """Returns the logits as (N, V), and whether that tensor is a copy. A copy may be overwritten, because nobody else
    can read it.
    """
    shape = (math.prod(logits.shape[:-1]), logits.shape[-1])
    try:
        return logits.view(shape), False
    except (RuntimeError, ValueError):  # ValueError: from a fake tensor
        return logits.reshape(shape), True


def losses_with_grad(
    operator: type[LogitsWithGrad],
    handed_over: Tensor | None,  # the caller's own tensor
    problem: TokenLosses,
    reduction: Reduction,
) -> tuple[Tensor, Tensor, TokenStatistics]:
    """Returns the loss () with its gradient, the losses of tokens (N,), and the statistics."""
    argmax = problem.statistics.argmax
    loss, losses, *_, largest = operator.applied(operator.like(problem, reduction=reduction, argmax=argmax))
    if handed_over is not None:
        remember_handed_over(loss, handed_over)
    return loss, losses, TokenStatistics(largest if argmax else None)
