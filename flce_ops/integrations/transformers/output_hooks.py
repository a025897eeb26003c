"""Hooks on the head that see its output: forward hooks and backward hooks.

    logits = lm_head(hidden)            what such a hook was written for
    loss = lm_head(hidden, target)      what it would see, and change, in a patched model

Hooks of the libraries that shard, move and count modules take any output alike. Where there is another one the model
runs its own forward, with logits. Pre-hooks see the hidden states in both.
"""

import functools
import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn

from flce_ops import torch_private

logger = logging.getLogger("flce_ops")

ANY_OUTPUT = (
    "torch.distributed",  # FSDP1, FSDP2, tensor parallelism
    "torch.utils",  # FlopCounterMode
    "deepspeed",
    "accelerate",
    "transformers.distributed",
    "transformers.integrations",
)

_logged: set[str] = set()


def wants_logits(head: nn.Module, model_name: str) -> bool:
    """Whether a hook sees the output of `head` that is not known to take any."""
    hooks = [hook for module in head.modules() for hook in hooks_of(module) if not takes_any_output(hook)]
    if hooks and not torch.compiler.is_compiling():
        names = ", ".join(dict.fromkeys(name_of(hook) for hook in hooks))
        message = (
            f"{model_name}: the patched model computes its loss from logits, as unpatched, since there are hooks on "
            f"its output embedding that see them: {names}"
        )
        if message not in _logged:
            _logged.add(message)
            logger.warning(message)
    return bool(hooks)


def hooks_of(module: nn.Module) -> Iterator[Callable]:
    yield from torch_private.hooks_on_the_output(module)
    if "_hf_hook" in module.__dict__:
        yield from post_forwards(module._hf_hook)


def post_forwards(hook) -> Iterator[Callable]:
    """Of accelerate's hook, which may be several in sequence."""
    if hasattr(hook, "hooks"):
        for inner in hook.hooks:
            yield from post_forwards(inner)
    else:
        yield hook.post_forward


def takes_any_output(hook: Callable) -> bool:
    origin = f"{innermost(hook).__module__}."
    return any(origin.startswith(f"{library}.") for library in ANY_OUTPUT)


def name_of(hook: Callable) -> str:
    function = innermost(hook)
    return getattr(function, "__qualname__", type(function).__qualname__)


def innermost(hook: Callable) -> Callable:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook
