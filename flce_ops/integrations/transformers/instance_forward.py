"""Replaces and restores the forward of one module instance."""

import inspect
from collections.abc import Callable
from types import MethodType

import torch
from torch import nn

# accelerate's hooks replace an instance's forward, and call the former one as _old_forward
HOOKED, PLAIN = "_old_forward", "forward"


class BoundForward:
    """`function` bound to `module` like a method, but pickle can write it.

    Pickle writes a method as the name of an attribute of `module`. A function that is not part of its class has no such
    name.
    """

    def __init__(self, function: Callable, module: nn.Module, rebuild: Callable[[nn.Module], "BoundForward"]) -> None:
        """rebuild: a top-level function of a file, which makes the bound forward again for a loaded module."""
        self.__func__ = function
        self.__self__ = module
        self.flce_rebuild = rebuild

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return self.flce_rebuild, (self.__self__,)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.__func__, self.__self__))


@torch.compiler.disable(reason="a patched class prepares a head at its first loss, which must run in eager mode")
def replace_forward(module: nn.Module, forward: BoundForward) -> None:
    """Replaces the forward. The bound function has the replaced one as `flce_original`."""
    place = HOOKED if HOOKED in module.__dict__ else PLAIN
    if has_another_forward(module, forward.__func__.flce_original):  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"this {type(module).__name__} has a forward of its own, {name_of(module.__dict__[place])}, which patch "
            "would put out of action; set it after patch if it calls the forward it replaces, or leave the model "
            "unpatched"
        )
    setattr(module, place, forward)


def has_another_forward(module: nn.Module, original: Callable) -> bool:
    """Whether somebody else has set a forward on the instance that is not its class's."""
    held = module.__dict__.get(HOOKED, module.__dict__.get(PLAIN))
    known = (None, type(module).forward, original)
    return unbound(held) not in known and not hasattr(unbound(held), "flce_original")


def is_replaced(module: nn.Module) -> bool:
    return any(hasattr(unbound(module.__dict__.get(place)), "flce_original") for place in (HOOKED, PLAIN))


def restore_forward(module: nn.Module) -> None:
    """Somebody else's forward stays, also if functools.wraps gave that forward the mark of ours."""
    if isinstance(module.__dict__.get(HOOKED), BoundForward):
        setattr(module, HOOKED, MethodType(type(module).forward, module))
    elif isinstance(module.__dict__.get(PLAIN), BoundForward):
        del module.forward


def name_of(function: Callable) -> str:
    """The function's name and where it is written. The name alone is not enough: functools.wraps gives a wrapper the
    name of the wrapped function.

    The repr of a bound method would contain its whole module.
    """
    function = unbound(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"a {type(function).__module__}.{type(function).__qualname__}"
    return f"{function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def unbound(method: Callable | None) -> Callable | None:
    return getattr(method, "__func__", method)
