"""Checks the arguments of public functions and modules against their annotations. A wrong type is refused by name
before any work.

arguments.py checks what annotations cannot say. Annotations that are not in KINDS are not checked.
"""

import difflib
import functools
import itertools
import types
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import torch
from torch import SymFloat, SymInt, Tensor

from ..support.holes import refuse_hole

Function = TypeVar("Function", bound=Callable)

# Real and Integral cover numpy's numbers. They stand last, because isinstance is slower on them.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    Tensor: ((Tensor,), "a tensor"),
    float: ((float, int, SymFloat, SymInt, Real), "a number"),
    int: ((int, SymInt, Integral), "an integer"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a string"),
    types.NoneType: ((types.NoneType,), "None"),
}

# Other libraries' names of an argument, each with the name that this package uses.
ELSEWHERE = {
    "labels": ("target",),
    "input": ("logits",),
    "hidden_states": ("input",),
    "bias": ("linear_bias",),
    "num_items_in_batch": ("normalizer",),
}


def typed(function: Function) -> Function:
    """Returns `function`, or a class's constructor, with checks of its arguments' types. `run.check(args, kwargs)` runs
    the checks alone.

    If a function gets a tensor for a number to which no gradient flows, it refuses the tensor and says so: reading the
    value would lose the tensor's graph silently. Modules pass their options on without these checks.
    """
    op = function.__qualname__.removesuffix(".__init__")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    hints = {name: parts_of(hint) for name, hint in function.__annotations__.items() if name != "return"}
    known = {name: parts for name, parts in hints.items() if all(part in KINDS for part in parts)}
    fitting = {name: tuple(kind for part in parts for kind in KINDS[part][0]) for name, parts in known.items()}
    numbers = {name for name, parts in known.items() if float in parts and Tensor not in parts}
    if op != function.__qualname__:
        fitting |= {name: (*fitting[name], Tensor) for name in numbers}

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks the arguments, and converts numbers in `kwargs` that the dispatcher does not take."""
        for name, value in itertools.chain(zip(names, args), kwargs.items()):
            kinds = fitting.get(name)
            if kinds is None:
                if name in kwargs and name not in hints:
                    refuse_name(op, name, tuple(hints))
                continue
            if name in numbers and isinstance(value, Tensor):
                raise TypeError(
                    f"{op}: expected {name} to be a number, got a tensor; no gradient is computed for {name}, so pass "
                    f"its value: {name}.item()"
                )
            if type(value) not in kinds:  # isinstance with an abstract base class takes a microsecond
                if not isinstance(value, kinds) or isinstance(value, bool):  # a bool is an int
                    refuse_type(op, name, value, " or ".join(KINDS[part][1] for part in known[name]))
                if name in kwargs and isinstance(value, Real) and not isinstance(value, float | int):
                    kwargs[name] = value = int(value) if isinstance(value, Integral) else float(value)
            if type(value) is int and not -(2**63) <= value < 2**63:
                kwargs[name] = as_float(op, name, value, float in known[name])

    @functools.wraps(function)
    def run(*args, **kwargs):
        check(args, kwargs)
        return function(*args, **kwargs)

    run.check = check  # type: ignore[attr-defined]
    return cast(Function, run)


def refuse_misnamed(op: str, misnamed: dict[str, Any], *names: str) -> None:
    """Refuses unknown keywords, which a method has collected in `misnamed`. The method has no wrapper for this check,
    because torch.fx could not trace the wrapper.
    """
    if isinstance(misnamed, dict):  # otherwise a torch.fx Proxy
        for name in misnamed:
            refuse_name(op, name, names)


def refuse_name(op: str, name: str, names: tuple[str, ...]) -> NoReturn:
    meant = [ours for ours in ELSEWHERE.get(name, ()) if ours in names] or difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(names)}"
    raise TypeError(f"{op}: no argument is named {name}; {hint}")


def refuse_type(op: str, name: str, value: Any, expected: str) -> NoReturn:
    if isinstance(value, torch.fx.Proxy):
        refuse_hole(op, "torch.fx", name=name)
    got = repr(value) if isinstance(value, str | int | float | complex | None) else type(value).__name__
    raise TypeError(f"{op}: expected {name} to be {expected}, got {got}")


def as_float(op: str, name: str, value: int, allowed: bool) -> float:
    """An integer beyond int64 as a float, or an error."""
    try:
        if allowed:
            return float(value)
    except OverflowError:
        pass
    dtype = "float64" if allowed else "int64"
    raise ValueError(f"{op}: expected {name} in the range of {dtype}, got an integer of {value.bit_length()} bits")


def parts_of(hint: Any) -> tuple[Any, ...]:
    parts = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(str if get_origin(part) is Literal else part for part in parts)
