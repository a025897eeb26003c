"""Token losses by name: `@flce_ops.token_loss`, and the names that operators take.

registered     for torch.compile, torch.export and direct calls of operators; kept
of an eager call, any callable, even a lambda; kept while a call or its backward needs it
"""

import functools
import itertools
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..support.compile_cache import digest_of_function
from .token_function import OP, TokenLoss

registered: dict[str, TokenLoss] = {}
_of_calls: weakref.WeakValueDictionary[str, TokenLoss] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def token_loss(function: Callable | None = None, *, name: str | None = None, compile: bool = False) -> Any:
    """Registers a function of one token's log-probability, so that torch.compile and torch.export take
    ``linear_token_loss`` of it. A decorator.

    Args:
        function: as in ``linear_token_loss``.
        name: what operators call the function; None stands for its qualified name. A saved program or a compiled graph
            finds the function by it. A second, different function is refused under a name that is taken.
        compile: let Inductor fuse the mapped function with its derivative. The first call runs as without it; the
            second compiles for some seconds. Worth it if small steps wait for the host. Has an effect where forward
            makes the gradients.

    Returns:
        A callable that ``linear_token_loss`` takes. A call of it calls the function.
    """
    if function is None:
        return functools.partial(token_loss, name=name, compile=compile)
    if not callable(function):
        raise TypeError(f"token_loss: expected a function of one token, got {type(function).__name__}")
    if name is None:
        qualified = getattr(function, "__qualname__", "<lambda>")
        if qualified.endswith("<lambda>"):
            raise TypeError(
                "token_loss: expected name, because a lambda, a partial or an object has no name of its own"
            )
        name = f"{function.__module__}.{qualified}"
    if not re.fullmatch(r"[\w.<>]+", name):
        raise ValueError(f"token_loss: expected name to be a dotted name, got {name!r}")
    taken = registered.get(name)
    if taken is not None and digest_of_function(taken.function) != digest_of_function(function):
        raise ValueError(
            f"token_loss: expected another name than {name!r}, under which a different function is registered; pass "
            "name=, or a number that differs as an argument of the function"
        )
    registered[name] = TokenLoss(function, name, compile=compile)
    return registered[name]


def token_loss_of(function: Any) -> TokenLoss:
    """The token loss that a user passed: a registered one, or any callable in eager mode. Dynamo traces this."""
    if isinstance(function, TokenLoss):
        return function
    if not callable(function):
        raise TypeError(f"{OP}: expected function to be a function of one token, got {type(function).__name__}")
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{OP}: expected function to be registered, because a graph holds its name; decorate it with "
            "@flce_ops.token_loss"
        )
    name = getattr(function, "__qualname__", type(function).__qualname__)
    loss = TokenLoss(function, f"{name}#{next(_numbers)}")
    _of_calls[loss.name] = loss
    return loss


def token_loss_named(name: str) -> TokenLoss:
    found = registered.get(name) or _of_calls.get(name)
    if found is None:
        raise RuntimeError(
            f"{OP}: expected function to be the name of a registered function, got {name!r}; import the module that "
            "registers it with @flce_ops.token_loss"
        )
    return found
