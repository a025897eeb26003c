"""The names in return_metrics: which results the entry operator must return for them, and how each metric follows from
these results.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..distributed.one_rank import any_dtensor
from ..math.options import Number, Statistics
from ..math.reduction import accuracy_of, count_right_and_valid, target_is_argmax

# results of torch.ops.flce.linear_cross_entropy_metrics after the loss
RESULTS = ("token_accuracy", "is_top1", *Statistics._fields)
OF_ARGMAX = ("token_accuracy", "is_top1", "argmax")
OF_LSE = ("lse", "z_loss")
NAMES = (*RESULTS, "z_loss")
OF_LOG_PROBS = ("log_sum_sq_probs", "mean_logit")


def checked_names(
    op: str, names: Sequence[str], known: tuple[str, ...], argument: str = "return_metrics"
) -> tuple[str, ...]:
    if isinstance(names, (str, bool)) or not isinstance(names, Sequence):
        raise TypeError(f"{op}: expected {argument} to be a sequence of names, got {names!r}")
    for name in names:
        if name not in known:
            raise ValueError(f"{op}: expected {argument} to name some of {', '.join(known)}; got {name!r}")
    return tuple(names)


def statistics_for(names: Sequence[str]) -> Statistics:
    asked = {name: name in names for name in Statistics._fields}
    asked["argmax"] = any(name in names for name in OF_ARGMAX)
    asked["lse"] = any(name in names for name in OF_LSE)
    return Statistics(**asked)


def by_name(names: Sequence[str], results: Sequence[Tensor], z_loss: Number) -> dict[str, Tensor]:
    found = dict(zip(RESULTS, results, strict=True))
    if "z_loss" in names:
        found["z_loss"] = found["lse"].square() * z_loss
    return {name: found[name] for name in names}


def accuracy_and_top1(argmax: Any, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:  # (), (...)
    """Returns the accuracy over all tokens, and is_top1. Both are DTensors if argmax is one. Then argmax and `target`
    on a rank belong to the same tokens.
    """
    if any_dtensor(argmax):
        from ..distributed.layout import accuracy_and_top1 as of_ranks

        return of_ranks(argmax, target, ignore_index)
    is_top1 = target_is_argmax(argmax, target, ignore_index)
    return accuracy_of(count_right_and_valid(is_top1, target, ignore_index)), is_top1
