"""Finds hooks that see logits: forward and backward hooks on the head and on its modules that make logits, and all
hooks on a module that computes the cross-entropy.

    logits = lm_head(hidden)            what such a hook was written for
    loss = lm_head(hidden, target)      what it would see, and could change, in a patched model

Hooks of libraries that shard, move or count modules accept any output. If there is another hook, the model runs its own
forward, with logits. Pre-hooks of the head, and modules that transform its input, see hidden states in either case, but
those of PEFT give the head an argument, the adapter of each sequence of a mixed batch, so that there is no one weight.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...support import torch_private
from ..full_logits import warn_once

ANY_OUTPUT = (
    "torch.distributed",  # FSDP1, FSDP2, tensor parallelism
    "torch.utils",  # FlopCounterMode
    "deepspeed",
    "accelerate",
    "transformers.distributed",
    "transformers.integrations",
)


def wants_logits(makers: Iterable[nn.Module], users: Iterable[nn.Module], model: nn.Module) -> bool:
    """Whether a hook that may need logits sees the results of `makers`, or the arguments or results of `users`. Warns
    once for each model.
    """
    hooks: list[Callable] = []
    for module in makers:
        hooks += hooks_on_the_output(module)
        hooks += [hook for hook in hooks_on_the_input(module) if is_of(("peft",), hook)]
    hooks += [hook for module in users for hook in [*hooks_on_the_input(module), *hooks_on_the_output(module)]]
    hooks = [hook for hook in hooks if not is_of(ANY_OUTPUT, hook)]
    if hooks and not torch.compiler.is_compiling():
        names = ", ".join(dict.fromkeys(name_of(hook) for hook in hooks))
        warn_once(
            f"{type(model).__name__}: the patched model computes its loss from logits, as unpatched, since there are "
            f"hooks on its output embedding or its loss that need them: {names}",
            model,
        )
    return bool(hooks)


def hooks_on_the_output(module: nn.Module) -> Iterator[Callable]:
    yield from torch_private.hooks_on_the_output(module)
    for hook in hooks_of_accelerate(module):
        yield hook.post_forward


def hooks_on_the_input(module: nn.Module) -> Iterator[Callable]:
    yield from torch_private.hooks_on_the_input(module)
    for hook in hooks_of_accelerate(module):
        yield hook.pre_forward


def hooks_of_accelerate(module: nn.Module) -> Iterator[Any]:
    if "_hf_hook" in module.__dict__:
        yield from in_sequence(module._hf_hook)


def in_sequence(hook) -> Iterator[Any]:
    if hasattr(hook, "hooks"):
        for inner in hook.hooks:
            yield from in_sequence(inner)
    else:
        yield hook


def is_of(libraries: tuple[str, ...], hook: Callable) -> bool:
    origin = f"{innermost(hook).__module__}."
    return any(origin.startswith(f"{library}.") for library in libraries)


def name_of(hook: Callable) -> str:
    function = innermost(hook)
    return getattr(function, "__qualname__", type(function).__qualname__)


def innermost(hook: Callable) -> Callable:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook
