"""The model's own forward, with the loss in place of the logits.

The forward runs on a stand-in for the model (head.py), whose head returns Logits (logits.py). A cross-entropy of them
calls the model's head with hidden states and targets. Arguments, mixture-of-experts losses and outputs stay the
model's. If logits are wanted beside the loss, they are computed after it, by the model's own operations.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...entry.rewrites import next_labels
from .head import STAND_IN, find_head, makers_of_logits, modules_that_see_logits, prepare_head
from .instance_forward import BoundForward, has_another_forward, is_replaced, replace_forward, restore_forward
from .logits import ADVICE, Call, Logits
from .no_logits import LOGITS_NOT_COMPUTED
from .output_hooks import wants_logits
from .output_metrics import with_metrics

# B batch, T tokens

ACTIVE = "_flce_loss_without_logits"  # attribute of an instance: whether its new forward is active
EVAL_LOGITS = "_flce_eval_logits"  # of an instance or a class: the option given to patch
METRICS = "_flce_metrics"  # likewise
GRADIENT_THRESHOLD = "_flce_gradient_threshold"  # likewise
LABEL_SMOOTHING = "_flce_label_smoothing"  # likewise
TAKEN_BY_TRAINER = "_flce_logits_taken_by_trainer"  # of an instance, while Trainer reads predictions from its output
# of an instance, while Trainer keeps the labels to itself: a SmoothedLoss
SMOOTHED_BY_TRAINER = "_flce_smoothed_by_trainer"


@dataclass
class SmoothedLoss:
    """The loss that Trainer's label smoother would compute from the logits of a forward without labels."""

    labels: Tensor  # (B, T)
    label_smoothing: float
    ignore_index: int
    shift_labels: bool
    count: Tensor | int | None  # the number of labels that are not ignored; None: those of this batch
    computed: bool = False  # whether the forward has put the loss into its output

    def of(self, logits: Logits) -> Tensor:  # ()
        target = next_labels(self.labels, self.ignore_index) if self.shift_labels else self.labels
        self.computed = True
        return logits.cross_entropy(
            target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, normalizer=self.count
        )


def prepare(model: PreTrainedModel) -> None:
    """Makes the model's head return the loss when it gets targets.

    Runs before every loss, because the head of a patched model may be replaced (resize_token_embeddings) or wrapped
    (PEFT).
    """
    holder = model.__dict__.get(STAND_IN)
    if holder is None or holder.module is not model:  # DataParallel copies the attributes of a model
        find_head(model)
    for module in list(makers_of_logits(model))[1:]:
        if isinstance(module, PreTrainedModel):
            activate(module)
        else:
            prepare_head(module)


def activate(model: PreTrainedModel) -> None:
    held_by_a_wrapper = hasattr(model, ACTIVE) and has_another_forward(model, original_of(type(model)))
    if not is_replaced(model) and not held_by_a_wrapper:
        replace_forward(model, forward_of_model(model))
    if not getattr(model, ACTIVE, False):
        setattr(model, ACTIVE, True)


def restore(model: PreTrainedModel) -> None:
    for module in [model, *modules_that_see_logits(model)]:
        if module is not model and EVAL_LOGITS in module.__dict__:  # a model in this one, patched by itself
            break
        restore_forward(module)
        module.__dict__.pop(STAND_IN, None)
        if module.__dict__.pop(ACTIVE, None) is not None and has_another_forward(module, original_of(type(module))):
            setattr(module, ACTIVE, False)  # a wrapper (accelerate's autocast) holds the forward


def forward_of_model(model: nn.Module) -> BoundForward:
    """The new forward of a model. While pickle loads the model, it may still be empty."""
    return BoundForward(forward_without_logits(type(model), of_instance=True), model, forward_of_model)


def original_of(cls: type[nn.Module]) -> Callable:
    return getattr(cls.forward, "flce_original", cls.forward)


def gives_logits(model: nn.Module) -> bool:
    """Whether `model` also returns logits beside the loss, which it computes without them."""
    if getattr(model, TAKEN_BY_TRAINER, False):
        return True
    return not model.training and getattr(model, EVAL_LOGITS, False)


def is_patched(model: nn.Module) -> bool:
    return getattr(model, ACTIVE, False) or hasattr(type(model).forward, "flce_original")


def forward_without_logits(cls: type[nn.Module], *, of_instance: bool) -> Callable:
    """The forward that replaces that of `cls`, or of one instance."""
    original = original_of(cls)
    parameters = list(inspect.signature(original).parameters)
    labels_at = parameters.index("labels") - 1 if "labels" in parameters else None  # without self

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        holder = self.__dict__.get(STAND_IN)
        if holder is not None and holder.module is self and holder.call is not None:  # a model around this one runs
            return original(holder.stand_in, *args, **kwargs)
        given = labels_at is not None and len(args) > labels_at
        labels = args[labels_at] if given else kwargs.get("labels")
        smoothed = getattr(self, SMOOTHED_BY_TRAINER, None) if labels is None else None
        # after unpatch, a hook or wrapper may still hold this forward
        active = getattr(self, ACTIVE, False) if of_instance else hasattr(cls, EVAL_LOGITS)
        if (labels is None and smoothed is None) or not active:
            return original(self, *args, **kwargs)
        prepare(self)
        name, label_smoothing = type(self).__name__, getattr(self, LABEL_SMOOTHING, 0.0)
        # DataParallel's replica has the model's stand-in
        if wants_logits(modules_that_see_logits(self), losses_in(self), self if holder is None else holder.module):
            if labels is not None and label_smoothing:
                raise NotImplementedError(
                    f"{name}: label_smoothing of patch: not implemented beside hooks that see logits, with which the "
                    "model computes its own loss; remove the hooks, or patch without label_smoothing"
                )
            return original(self, *args, **kwargs)
        # no metrics then: Trainer takes everything beside the loss for predictions
        metrics = () if getattr(self, TAKEN_BY_TRAINER, False) else getattr(self, METRICS, ())
        call = Call(name, metrics, label_smoothing, getattr(self, GRADIENT_THRESHOLD, 0.0))
        holder = self.__dict__[STAND_IN]
        holder.call = call
        try:
            output = original(holder.stand_in, *args, **kwargs)
        finally:
            holder.call = None
        if smoothed is not None:
            output = with_loss(output, smoothed)
        elif call.losses == 0:
            raise NotImplementedError(
                f"{name}: expected its loss to be a cross-entropy of what its output embedding returns, got a loss by "
                f"other means; {ADVICE}"
            )
        output = without_logits(output, compute=gives_logits(self))
        return with_metrics(output, call.metrics.found)

    forward.flce_original = original  # type: ignore[attr-defined]
    return forward


def losses_in(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.children() if isinstance(module, nn.CrossEntropyLoss)]


def with_loss(output: Any, smoothed: SmoothedLoss) -> Any:
    if isinstance(output, tuple):
        return (smoothed.of(next(value for value in output if isinstance(value, Logits))), *output)
    return type(output)(**{**output, "loss": smoothed.of(output["logits"])})


def without_logits(value: Any, *, compute: bool) -> Any:
    """A model's output, also inside of another output, with the object in place of logits, or with logits."""
    if isinstance(value, Logits):
        return value.compute() if compute else LOGITS_NOT_COMPUTED
    if isinstance(value, ModelOutput):
        # an exported program may return only tensors
        kept = {
            name: part
            for name, part in value.items()
            if not (torch.compiler.is_exporting() and isinstance(part, Logits))
        }
        return type(value)(**{name: without_logits(part, compute=compute) for name, part in kept.items()})
    if type(value) is tuple:
        return tuple([without_logits(part, compute=compute) for part in value])
    return value
