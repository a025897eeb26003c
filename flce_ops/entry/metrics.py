"""return_metrics by name: what the entry operator is asked for, and which of its results, or what of them, that is."""

from collections.abc import Sequence

from torch import Tensor

from flce_ops.math.options import Statistics
from flce_ops.math.scalars import Number

# of torch.ops.flce.linear_cross_entropy_metrics, behind the loss
RESULTS = ("token_accuracy", "is_top1", *Statistics._fields)
OF_ARGMAX = ("token_accuracy", "is_top1", "argmax")
OF_LSE = ("lse", "z_loss")
NAMES = (*RESULTS, "z_loss")


def metric_names(op: str, return_metrics: bool | Sequence[str]) -> tuple[str, ...]:
    if isinstance(return_metrics, bool):
        return OF_ARGMAX if return_metrics else ()
    if isinstance(return_metrics, str) or not isinstance(return_metrics, Sequence):
        raise TypeError(f"{op}: expected return_metrics to be a bool or a sequence of names, got {return_metrics!r}")
    unknown = [name for name in return_metrics if name not in NAMES]
    if unknown:
        raise ValueError(f"{op}: expected return_metrics to name some of {', '.join(NAMES)}; got {unknown[0]!r}")
    return tuple(return_metrics)


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
