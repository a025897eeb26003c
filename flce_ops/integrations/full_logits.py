"""Warns once if a trainer computes logits in a training step although a model or TRL was patched to avoid them. The
warning names the trainer.

While Trainer.train runs, a hook on its model looks at the outputs of training forwards. `patch` of Transformers and of
TRL register an adviser, which says for which trainers to warn, and what to do.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger("flce_ops")

SERVED_OF_TRL = (
    "flce_ops.integrations.trl.patch() serves TRL's SFT, DPO, KTO, GRPO, RLOO and Distillation trainers, without "
    "label_smoothing_factor and compute_loss_func; docs/clients.md says what to do for others"
)

Adviser = Callable[[Any], str | None]  # takes a trainer, returns advice about its logits; None if nothing is patched
_advisers: list[Adviser] = []
_logged: set[Any] = set()


def warn_once(message: str, about: Any = None) -> None:
    """Logs a message once a process, or once for each object that it is about."""
    key = message, None if about is None else weakref.ref(about)
    if key not in _logged:
        _logged.add(key)
        logger.warning(message)


def is_of_trl(trainer: Any) -> bool:
    return any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)


def watch_trainers(adviser: Adviser, **wrappers: Callable[[Callable], Callable]) -> None:
    """Wraps the methods of Trainer with these names, once a process: `train` by `watching`, and others. Before any is
    wrapped, AttributeError if Trainer lacks one, and NotImplementedError if one takes other arguments.
    """
    from transformers.trainer import Trainer

    found = {name: getattr(Trainer, name) for name in wrappers}
    made = {name: wrappers[name](method) for name, method in found.items() if not hasattr(method, "flce_original")}
    for name, method in made.items():
        check_arguments(f"Trainer.{name}", found[name], method)
    for name, method in made.items():
        functools.update_wrapper(method, found[name]).flce_original = found[name]  # type: ignore[attr-defined]
        setattr(Trainer, name, method)
    if adviser not in _advisers:
        _advisers.append(adviser)


def check_arguments(name: str, original: Callable, wrapper: Callable) -> None:
    """That `original` takes the named arguments of `wrapper`, in its order, or any."""
    expected, taken = (list(inspect.signature(method).parameters.values()) for method in (wrapper, original))
    named = [one.name for one in expected if one.kind is one.POSITIONAL_OR_KEYWORD]
    if [one.name for one in taken][: len(named)] != named and not any(one.kind is one.VAR_POSITIONAL for one in taken):
        raise NotImplementedError(
            f"expected {name} to take {', '.join(named)}, got {inspect.signature(original)}; flce_ops knows it in "
            "Transformers 5.23"
        )


def watching(original: Callable) -> Callable:
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        advice = next((found for adviser in _advisers if (found := adviser(self)) is not None), None)
        if advice is None:
            return original(self, *args, **kwargs)
        hook = self.model.register_forward_hook(functools.partial(warn_of_logits, self, advice))
        try:
            return original(self, *args, **kwargs)
        finally:
            hook.remove()

    return train


def warn_of_logits(trainer: Any, advice: str, model: nn.Module, args: Any, output: Any) -> None:
    logits = output.get("logits") if isinstance(output, dict) else None
    if torch.compiler.is_compiling() or not isinstance(logits, Tensor) or not logits.requires_grad:
        return
    if getattr(model, "get_output_embeddings", lambda: None)() is None:  # a classifier, whose logits are a few numbers
        return
    options = {"compute_loss_func": trainer.compute_loss_func, "label_smoothing_factor": trainer.label_smoother}
    given = [f" ({name} is given)" for name, option in options.items() if option is not None][:1]
    warn_once(
        f"{type(trainer).__name__} takes its loss from the logits of its model{''.join(given)}: a training step holds "
        f"them, and flce_ops does not compute that loss. {advice}"
    )
