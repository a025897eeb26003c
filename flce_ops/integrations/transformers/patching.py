"""Puts the forward without logits in place, on a model or on a class, and takes it away."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from ...entry.arguments import check_ranges
from ...entry.bodies import NAMES, checked_names
from ...functional.public import typed
from ..sparse_options import check_threshold
from .forward import (
    ACTIVE,
    EVAL_LOGITS,
    GRADIENT_THRESHOLD,
    LABEL_SMOOTHING,
    METRICS,
    activate,
    forward_without_logits,
    original_of,
    prepare,
    restore,
)
from .head import STAND_IN, STAND_INS
from .liger import check_loss_is_not_ligers, inside_peft
from .logits import ADVICE
from .trainer import announce_to_models

Model = TypeVar("Model", bound=nn.Module | type[PreTrainedModel])

# The options of patch, and the attribute of the instance or class that holds each.
OPTIONS = {
    "eval_logits": EVAL_LOGITS,
    "metrics": METRICS,
    "gradient_threshold": GRADIENT_THRESHOLD,
    "label_smoothing": LABEL_SMOOTHING,
}


@typed
def patch(
    model_or_class: Model,
    *,
    eval_logits: bool = False,
    metrics: Sequence[str] = (),
    gradient_threshold: float = 0.0,
    label_smoothing: float = 0.0,
) -> Model:
    """Make a language model compute its loss with `flce_ops.linear_cross_entropy`, without logits.

    With labels, the output has the loss, and in place of the logits an object that raises when it is used. Without
    labels the output is what it was. Everything else that the model's forward takes and returns stays:
    num_items_in_batch, shift_labels, ignore_index, logits_to_keep, router losses, hidden states, return_dict.

    Transformers' Trainer gets logits where it needs predictions: in evaluate with compute_metrics, and in predict.

    Args:
        model_or_class: a Transformers model, a model wrapped by PEFT, or a model class, for all of its instances.
        eval_logits: also return logits in eval mode, for an evaluation other than Trainer's.
        metrics: names of `linear_cross_entropy`'s return_metrics, such as ("token_accuracy", "entropy"), which become
            further fields of the output. A position's metric belongs to the label that its logits predict, so the last
            position of a causal model has 0. Trainer's predictions have no metrics.
        gradient_threshold: as in `linear_cross_entropy`, such as 2**-10: unbiased sparse gradients of the head. Each
            loss draws its seed from torch's default generator.
        label_smoothing: as in `linear_cross_entropy`, in training and evaluation. Trainer's label_smoothing_factor
            needs no option here, and replaces this one in the losses that Trainer asks for.

    Returns:
        model_or_class.

    Raises:
        NotImplementedError: the model has no output embedding, or its forward takes no labels or was replaced. The
            first loss raises it, too, if it needs the logits: for another operation than a scale, a softcap, a bias,
            a choice of tokens and a cross-entropy, or for a head that is no linear layer.
        TypeError: not a Transformers model.
        ValueError: an unknown metric, a gradient_threshold outside [0, 1), or a label_smoothing outside [0, 1].
    """
    names = checked_names("patch", metrics, NAMES, "metrics")
    check_threshold("patch", gradient_threshold)
    check_ranges("patch", ["label_smoothing"], [label_smoothing])
    check_loss_is_not_ligers(model_or_class)
    announce_to_models()
    if isinstance(model_or_class, type):
        patch_class(model_or_class)
        patched: nn.Module | type[PreTrainedModel] = model_or_class
    else:
        patched = base_model_of(model_or_class)
        check_labels(type(patched))
        try:
            prepare(patched)
            activate(patched)
        except NotImplementedError:
            if EVAL_LOGITS not in vars(patched):
                restore(patched)
            raise
    chosen = {
        "eval_logits": eval_logits,
        "metrics": names,
        "gradient_threshold": gradient_threshold,
        "label_smoothing": label_smoothing,
    }
    for name, attribute in OPTIONS.items():
        setattr(patched, attribute, chosen[name])
    return model_or_class


def unpatch(model_or_class: Model) -> Model:
    """Undo `patch` of the same model or class. ValueError if the model or class is not patched."""
    if isinstance(model_or_class, type):
        original = getattr(model_or_class.__dict__.get("forward"), "flce_original", None)
        if original is None:
            raise ValueError(f"{model_or_class.__name__} is not patched")
        del model_or_class.forward
        forget_options(model_or_class)
        if original_of(model_or_class) is not original:  # the class inherited it otherwise
            model_or_class.forward = original
        for model in [stand_in.module for stand_in in STAND_INS]:
            if isinstance(model, model_or_class) and not getattr(model, ACTIVE, False):
                restore(model)
        return model_or_class
    model = base_model_of(model_or_class)
    # a stand-in alone: the model was read from a file that was written while its class was patched
    read = STAND_IN in vars(model) and not hasattr(type(model).forward, "flce_original")
    if not getattr(model, ACTIVE, False) and not read:
        raise ValueError(f"this {type(model).__name__} is not patched (its class may be)")
    restore(model)
    forget_options(model)
    return model_or_class


def forget_options(patched: nn.Module | type) -> None:
    for attribute in vars(patched).keys() & OPTIONS.values():
        delattr(patched, attribute)


@contextlib.contextmanager
@typed
def patched(
    model_or_class: Model,
    *,
    eval_logits: bool = False,
    metrics: Sequence[str] = (),
    gradient_threshold: float = 0.0,
    label_smoothing: float = 0.0,
) -> Iterator[Model]:
    """`patch` during a with block. A model that was patched before stays patched, with the options it had."""
    inside = vars(model_or_class if isinstance(model_or_class, type) else base_model_of(model_or_class))
    before = {name: inside[attribute] for name, attribute in OPTIONS.items()} if EVAL_LOGITS in inside else None
    patch(
        model_or_class,
        eval_logits=eval_logits,
        metrics=metrics,
        gradient_threshold=gradient_threshold,
        label_smoothing=label_smoothing,
    )
    try:
        yield model_or_class
    finally:
        unpatch(model_or_class) if before is None else patch(model_or_class, **before)


def patch_class(cls: type[nn.Module]) -> None:
    if not issubclass(cls, PreTrainedModel):
        raise TypeError(f"expected a class of Transformers models, got {cls!r}")
    check_labels(cls)
    if not hasattr(cls.__dict__.get("forward"), "flce_original"):
        cls.forward = forward_without_logits(cls, of_instance=False)


def check_labels(cls: type[nn.Module]) -> None:
    if "labels" not in inspect.signature(original_of(cls)).parameters:
        raise NotImplementedError(f"{cls.__name__}: its forward takes no labels; {ADVICE}")


def base_model_of(model: nn.Module) -> PreTrainedModel:
    model = inside_peft(model)
    if not isinstance(model, PreTrainedModel):
        wrapped = [name for name in ("_orig_mod", "module") if isinstance(getattr(model, name, None), nn.Module)]
        hint = f"; patch its .{wrapped[0]}, before or after it is wrapped" if wrapped else ""
        raise TypeError(f"expected a Transformers model, or one wrapped by PEFT, got {type(model).__qualname__}{hint}")
    return model
