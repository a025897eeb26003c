"""Metrics of the loss in a model's output: return_metrics of linear_cross_entropy, as further fields.

They are fields of a dataclass that is made here, a subclass of the output's class. Attributes would be lost when an
output is rebuilt from its entries (accelerate's mixed precision, pytrees). They are the last fields, so that the other
entries keep their places in a tuple.
"""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# made for output classes seen so far; torch.compile cannot make a class
CLASSES: dict[tuple[type, tuple[str, ...]], type] = {}


class Metrics:
    """The metrics to ask for, and a place for them. Hooks that cast or copy arguments treat it as a leaf and leave it
    alone.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.found: dict[str, Tensor] = {}

    def put(self, found: dict[str, Tensor]) -> None:
        if self.found:
            raise NotImplementedError("metrics of patch: not implemented for several losses; patch without")
        for name, values in found.items():
            self.found[name] = values.full_tensor() if isinstance(values, DTensor) else values


def with_metrics(output: Any, found: dict[str, Tensor]) -> Any:
    if not found:
        return output
    if isinstance(output, tuple):
        return (*output, *found.values())
    key = (type(output), tuple(found))
    if key not in CLASSES:
        CLASSES[key] = class_with(*key)
    return CLASSES[key](**dict(output.items()), **found)


@torch.compiler.disable(reason="it makes a class of outputs with metrics, which the first loss must do in eager mode")
def class_with(base: type, names: tuple[str, ...]) -> type:
    taken = {known.name for known in fields(base)} & set(names)
    if taken:
        raise ValueError(f"patch: expected metrics for which {base.__name__} has no field, got {sorted(taken)}")
    extra = [(name, Tensor | None, field(default=None)) for name in names]
    return make_dataclass(f"{base.__name__}WithMetrics", extra, bases=(base,), namespace={"__reduce__": reduce})


def reduce(output: Any) -> tuple[Any, ...]:
    """For pickle and copies, which look up classes by name."""
    base = type(output).__bases__[0]
    known = {one.name for one in fields(base)}
    own = [one.name for one in fields(output) if one.name not in known]
    of_base = base(**{name: value for name, value in output.items() if name in known})
    return with_metrics, (of_base, {name: getattr(output, name) for name in own})
