"""Makes a public function from its signature: checks the arguments, and passes them by name to the entry operator.

@public(body)
def linear_policy_loss(input, ..., *, temperature=1.0):      the signature, its types and defaults, and the docstring
body(arguments)   ->   call_entry(name, arguments)   ->   torch.ops.flce.linear_policy_loss

Arguments are checked against their annotations: a wrong type is refused by name before any work. entry/arguments.py
checks what annotations cannot say. Annotations that are not in KINDS are not checked.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin

import torch
from torch import SymFloat, SymInt, Tensor

from .._ops import ops
from ..entry import BODIES, ENTRIES
from ..entry.arguments import resolve_ignore_index
from ..entry.rewrites import shifted_target, with_learnt_scale
from ..math.options import number_tensor
from ..meta.checks import assert_counts
from ..support.refusals import hint_of_type, refuse_class_weight, refuse_hole, refuse_name
from ..support.torch_private import profiler_is_on

Function = TypeVar("Function", bound=Callable)
DEFAULTS = {name: dict(zip(arguments.index, arguments.defaults)) for name, (arguments, *_) in ENTRIES.items()}

# Real and Integral cover numpy's numbers. They stand last, because isinstance is slower on them.
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    Tensor: ((Tensor,), "a tensor"),
    float: ((float, int, SymFloat, SymInt, Real), "a number"),
    int: ((int, SymInt, Integral), "an integer"),
    bool: ((bool,), "True or False"),
    str: ((str,), "a string"),
    types.NoneType: ((types.NoneType,), "None"),
}


def typed(function: Function) -> Function:
    """Returns `function`, or a class's constructor, with checks of its arguments' types. `run.check(args, kwargs)` runs
    the checks alone.

    If a function gets a tensor for a number to which no gradient flows, it refuses the tensor and says so: reading the
    value would lose the tensor's graph silently. Modules pass their options on without these checks.
    """
    op = function.__qualname__.removesuffix(".__init__")
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    code = function.__code__
    more = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if takes_more(function) else ""
    hints = {name: parts_of(hint) for name, hint in function.__annotations__.items() if name not in ("return", more)}
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
            # a compiled graph's integers are int64, and a comparison would be a guard on them
            if type(value) is int and not torch.compiler.is_compiling() and not -(2**63) <= value < 2**63:
                kwargs[name] = as_float(op, name, value, float in known[name])

    @functools.wraps(function)
    def run(*args, **kwargs):
        check(args, kwargs)
        return function(*args, **kwargs)

    run.check = check  # type: ignore[attr-defined]
    return cast(Function, run)


def refuse_misnamed(module: torch.nn.Module, misnamed: dict[str, Any]) -> None:
    """Refuses unknown keywords, which forward has collected in `misnamed`. forward has no wrapper for this check,
    because torch.fx could not trace the wrapper.
    """
    if isinstance(misnamed, dict):  # otherwise a torch.fx Proxy
        for name in misnamed:
            refuse_name(type(module).__name__, name, ("input", "target", *type(module).forward.__kwdefaults__))


def refuse_type(op: str, name: str, value: Any, expected: str) -> NoReturn:
    if isinstance(value, torch.fx.Proxy):
        refuse_hole(op, "torch.fx", name=name)
    got = repr(value) if isinstance(value, str | int | float | complex | None) else type(value).__name__
    hint = hint_of_type(name, value) if "tensor" in expected else ""
    raise TypeError(f"{op}: expected {name} to be {expected}, got {got}{hint}")


def as_float(op: str, name: str, value: int, allowed: bool) -> float:
    """An integer beyond int64 as a float, or an error."""
    try:
        if allowed:
            return float(value)
    except OverflowError:
        pass
    dtype = "float64" if allowed else "int64"
    raise ValueError(f"{op}: expected {name} in the range of {dtype}, got an integer of {value.bit_length()} bits")


def takes_more(function: Callable) -> bool:
    """Whether the function takes any number of positional arguments."""
    return bool(function.__code__.co_flags & inspect.CO_VARARGS)


def parts_of(hint: Any) -> tuple[Any, ...]:
    parts = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(str if get_origin(part) is Literal else part for part in parts)


def public(body: Callable[[dict[str, Any]], Any], *, only_for: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Decorates a signature. `body` gets the arguments that the caller gave, by name. With `only_for`, it is called
    only if one of these arguments is among them; otherwise the entry operator of the function's name is.
    """

    def decorate(signature: Function) -> Function:
        check, code = typed(signature).check, signature.__code__  # type: ignore[attr-defined]
        positional, defaults = code.co_varnames[: code.co_argcount], signature.__defaults__ or ()
        required = positional[: len(positional) - len(defaults)]
        more = takes_more(signature)

        @functools.wraps(signature)
        def run(*args, **kwargs):
            check(args, kwargs)
            given = {**dict(zip(positional, args)), **kwargs}
            rest = args[len(positional) :] if more else ()
            fits = len(given) + len(rest) == len(args) + len(kwargs)
            for name in required:
                fits &= name in given
            if not fits:
                refuse_class_weight(signature.__name__, given)
                signature(*args, **kwargs)  # raises Python's own error
            if more:
                given["tensors"] = rest
            needed = not only_for
            for name in only_for:
                needed |= name in given
            if needed:
                return body(given)
            name = signature.__name__
            return entry_of(name)(**prepared(name, given))

        run.check = check  # type: ignore[attr-defined]
        return cast(Function, run)

    return decorate


def prepared(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the entry operator `name` for those of a public function."""
    rows, target = given["input" if "input" in given else "logits"], given.get("target")
    if isinstance(given.get("logit_scale"), Tensor) or isinstance(given.get("temperature"), Tensor):
        given = with_learnt_scale(name, given, DEFAULTS[name])
    if target is not None and target.dtype == torch.uint8:  # beside which torch compares -100 as 156
        given["target"] = target = target.long()
    if given.get("normalizer") is not None:
        given["normalizer"] = number_tensor(name, "normalizer", given["normalizer"], rows)
    if given.pop("shift", False):
        given["target"] = target = shifted_target(name, target, rows, given.get("ignore_index", -100))
    if given.get("ignore_index", -100) != -100:
        given["ignore_index"] = resolve_ignore_index(name, given["ignore_index"], target)
    if torch.compiler.is_compiling():
        assert_counts(name, given, rows)
    return given


def entry_of(name: str) -> Callable:
    """The entry operator, or its body, which does what the dispatcher would do, without the dispatcher's 6 us."""
    return getattr(ops, name) if torch.compiler.is_compiling() or profiler_is_on() else BODIES[name]


def call_entry(name: str, given: dict[str, Any], *, metrics: str = "", asked: dict[str, bool] | None = None) -> Any:
    """Calls the entry operator `name` and returns its results. `metrics` is the suffix of the variant that returns
    metrics, which are `asked` for.
    """
    return entry_of(name + metrics)(**prepared(name, given), **(asked or {}))
