"""Makes a public function from its signature: checks the arguments, and passes them by name to the entry operator.

@public(body)
def linear_policy_loss(input, ..., *, temperature=1.0):      the signature, its types and defaults, and the docstring
body(arguments)   ->   call_entry(name, arguments)   ->   torch.ops.flce.linear_policy_loss
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .._ops import ops
from ..entry import BODIES, ENTRIES
from ..entry.argument_types import typed
from ..entry.arguments import resolve_ignore_index
from ..entry.learnt_scale import apply_learnt_scale
from ..entry.shifted_target import shifted_target
from ..entry.support import parts_of_support
from ..entry.token_temperature import as_argument
from ..math.options import normalizer_tensor
from ..support import rank_check
from ..support.dtensor import any_dtensor
from ..support.holes import refuse_hole

Function = TypeVar("Function", bound=Callable)
REQUIRED = object()
POSITIONAL = {name: tuple(arguments.index)[: arguments.positional] for name, (arguments, *_) in ENTRIES.items()}
DEFAULTS = {name: set(zip(arguments.index, arguments.defaults)) for name, (arguments, *_) in ENTRIES.items()}


def public(body: Callable[[dict[str, Any]], Any]) -> Callable[[Function], Function]:
    def decorate(signature: Function) -> Function:
        check, code = typed(signature).check, signature.__code__  # type: ignore[attr-defined]
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        positional, defaults = names[: code.co_argcount], signature.__defaults__ or ()
        required = positional[: len(positional) - len(defaults)]
        usual = (
            dict.fromkeys(names, REQUIRED) | dict(zip(positional[len(required) :], defaults)) | signature.__kwdefaults__
        )

        @functools.wraps(signature)
        def run(*args, **kwargs):
            check(args, kwargs)
            named = {**dict(zip(positional, args)), **kwargs}
            given = {**usual, **named}
            fits = len(named) == len(args) + len(kwargs)
            for name in required:
                fits &= given[name] is not REQUIRED
            if not fits:
                signature(*args, **kwargs)  # raises Python's own error
            if rank_check.ENABLED and not torch.compiler.is_compiling():
                rank_check.check_ranks(signature.__name__, given)
            return body(given)

        run.check = check  # type: ignore[attr-defined]
        return cast(Function, run)

    return decorate


def call_entry(name: str, given: dict[str, Any], *, metrics: str = "", asked: dict[str, bool] | None = None) -> Any:
    """Calls the entry operator `name` and returns its results. `metrics` is the suffix of the variant that returns
    metrics.
    """
    rows, target = given["input"] if "input" in given else given["logits"], given["target"]
    if isinstance(given["temperature"], Tensor):
        given = {**given, **as_argument(name, given["temperature"], "input" if "input" in given else "logits")}
    if isinstance(given["logit_scale"], Tensor) or isinstance(given["temperature"], Tensor):
        read = ("input", "linear_bias", "logit_scale", "temperature")
        learnt = apply_learnt_scale(name, *[given[argument] for argument in (*read, "softcap")])
        given = {**given, **dict(zip(read, learnt))}
    if given.get("normalizer") is not None:
        given["normalizer"] = normalizer_tensor(given["normalizer"], rows)
    if "support" in given:
        given["support"], given["support_offsets"] = parts_of_support(name, given["support"])
        if given["support"] is not None and given.get("shift"):
            refuse_hole(name, "shift and support")
    if given.pop("shift", False):
        given["target"] = target = shifted_target(name, target, rows, given["ignore_index"])
    if given["ignore_index"] != -100:
        given["ignore_index"] = resolve_ignore_index(name, given["ignore_index"], target)
    if asked:
        given.update(asked)
    name += metrics
    eager = not torch.compiler.is_compiling()
    if eager and torch.is_inference_mode_enabled() and any_dtensor(*given.values()):
        # Calls the body directly. Usually the dispatcher's autograd key runs the body. In inference mode DTensor sees
        # the call first, and refuses plain tensors beside DTensors.
        return BODIES[name](**given)
    positional = [given.pop(argument) for argument in POSITIONAL[name]]
    if eager:  # the dispatcher fills in defaults faster than it takes them
        given = dict(given.items() - DEFAULTS[name])
    return getattr(ops, name)(*positional, **given)
