"""Arguments of the public functions and modules by their annotations: a wrong type is refused by name before any work.

What the annotations do not say, the checks of arguments.py do; an annotation that is not in KINDS says nothing.
"""

import functools
import itertools
import types
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeVar, cast, get_args

from torch import SymFloat, SymInt, Tensor

Function = TypeVar("Function", bound=Callable)

# Real and Integral are numpy's, behind those that an isinstance finds faster.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    Tensor: ((Tensor,), "a tensor"),
    float: ((float, int, SymFloat, SymInt, Real), "a number"),
    int: ((int, SymInt, Integral), "an integer"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a string"),
    types.NoneType: ((types.NoneType,), "None"),
}


def typed(function: Function) -> Function:
    """`function`, or the constructor of a class, with its arguments' types checked.

    A tensor in place of a number would be read, its graph lost in silence: a function refuses it and says so, where no
    gradient reaches that number. A module hands on what it holds.
    """
    op = function.__qualname__.removesuffix(".__init__")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    hints = {name: parts_of(hint) for name, hint in function.__annotations__.items() if name != "return"}
    known = {name: parts for name, parts in hints.items() if all(part in KINDS for part in parts)}
    fitting = {name: tuple(kind for part in parts for kind in KINDS[part][0]) for name, parts in known.items()}
    numbers = {name for name, parts in known.items() if float in parts and Tensor not in parts}
    if op != function.__qualname__:
        fitting |= {name: (*fitting[name], Tensor) for name in numbers}

    @functools.wraps(function)
    def run(*args, **kwargs):
        for name, value in itertools.chain(zip(names, args), kwargs.items()):
            kinds = fitting.get(name)
            if kinds is None or type(value) in kinds:  # an isinstance that asks an ABC takes a microsecond
                continue
            if name in numbers and isinstance(value, Tensor):
                raise TypeError(
                    f"{op}: expected {name} to be a number, got a tensor; no gradient is computed for {name}, so pass "
                    f"its value: {name}.item()"
                )
            if not isinstance(value, kinds) or isinstance(value, bool):  # which is an int
                expected = " or ".join(KINDS[part][1] for part in known[name])
                got = repr(value) if isinstance(value, str | int | float | complex | None) else type(value).__name__
                raise TypeError(f"{op}: expected {name} to be {expected}, got {got}")
            if name in kwargs and isinstance(value, Real) and not isinstance(value, float | int):
                kwargs[name] = int(value) if isinstance(value, Integral) else float(value)  # for the dispatcher
        return function(*args, **kwargs)

    return cast(Function, run)


def parts_of(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
