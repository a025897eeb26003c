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
DEFAULTS = {name: dict(zip(arguments.index, arguments.defaults)) for name, (arguments, *_) in ENTRIES.items()}


def public(body: Callable[[dict[str, Any]], Any]) -> Callable[[Function], Function]:
    """Decorates a signature. `body` gets the arguments that the caller gave, by name."""

    def decorate(signature: Function) -> Function:
        check, code = typed(signature).check, signature.__code__  # type: ignore[attr-defined]
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        positional, defaults = names[: code.co_argcount], signature.__defaults__ or ()
        required = positional[: len(positional) - len(defaults)]
        usual = dict.fromkeys(names) | dict(zip(positional[len(required) :], defaults)) | signature.__kwdefaults__

        @functools.wraps(signature)
        def run(*args, **kwargs):
            check(args, kwargs)
            given = {**dict(zip(positional, args)), **kwargs}
            fits = len(given) == len(args) + len(kwargs)
            for name in required:
                fits &= name in given
            if not fits:
                signature(*args, **kwargs)  # raises Python's own error
            if rank_check.ENABLED and not torch.compiler.is_compiling():
                rank_check.check_ranks(signature.__name__, usual | given)
            return body(given)

        run.check = check  # type: ignore[attr-defined]
        return cast(Function, run)

    return decorate


def call_entry(name: str, given: dict[str, Any], *, metrics: str = "", asked: dict[str, bool] | None = None) -> Any:
    """Calls the entry operator `name` and returns its results. `metrics` is the suffix of the variant that returns
    metrics.
    """
    of = "input" if "input" in given else "logits"
    rows, target = given[of], given.get("target")
    if isinstance(given.get("temperature"), Tensor):
        given = {**given, **as_argument(name, given["temperature"], of)}
    if isinstance(given.get("logit_scale"), Tensor) or isinstance(given.get("temperature"), Tensor):
        read = ("input", "linear_bias", "logit_scale", "temperature")
        learnt = apply_learnt_scale(name, *[(DEFAULTS[name] | given)[argument] for argument in (*read, "softcap")])
        given = {**given, **dict(zip(read, learnt))}
    if given.get("normalizer") is not None:
        given["normalizer"] = normalizer_tensor(given["normalizer"], rows)
    if given.get("support") is not None:
        given["support"], given["support_offsets"] = parts_of_support(name, given["support"])
        if given.get("shift"):
            refuse_hole(name, "shift and support")
    if given.pop("shift", False):
        given["target"] = target = shifted_target(name, target, rows, given.get("ignore_index", -100))
    if given.get("ignore_index", -100) != -100:
        given["ignore_index"] = resolve_ignore_index(name, given["ignore_index"], target)
    if asked:
        given.update(asked)
    name += metrics
    eager = not torch.compiler.is_compiling()
    if eager and torch.is_inference_mode_enabled() and any_dtensor(*given.values()):
        # Calls the body directly. Usually the dispatcher's autograd key runs the body. In inference mode DTensor sees
        # the call first, and refuses plain tensors beside DTensors.
        return BODIES[name](**given)
    if eager:  # the dispatcher fills in defaults faster than it takes them
        usual = DEFAULTS[name]
        given = {argument: value for argument, value in given.items() if value is not usual[argument]}
    return getattr(ops, name)(**given)
