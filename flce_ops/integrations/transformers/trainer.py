"""Trainer reads a model's logits as predictions. It gets logits only where it does so, and otherwise evaluates by the
loss alone.

    evaluate, no compute_metrics          prediction_step(..., prediction_loss_only=True)     no logits
    evaluate with compute_metrics         prediction_step(..., prediction_loss_only=False)    logits
    predict                               prediction_step(..., prediction_loss_only=False)    logits

Only that argument distinguishes the three. The model's forward gets the same arguments in all of them. So
`prediction_step` tells the patched models that it calls. Models that are not patched are not touched.

With label_smoothing_factor, `compute_loss` keeps the labels and computes its own loss from the logits. Here it
passes the labels to the patched model, whose forward computes that loss instead of the logits.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..full_logits import SERVED_OF_TRL, is_of_trl, warn_once, watch_trainers, watching
from .forward import EVAL_LOGITS, SMOOTHED_BY_TRAINER, TAKEN_BY_TRAINER, SmoothedLoss, gives_logits, is_patched
from .liger import check_loss_is_not_ligers, inside_peft


def announce_to_models() -> None:
    try:
        import transformers.trainer  # noqa: F401
    except ImportError as error:
        if importlib.util.find_spec("accelerate") is not None:  # which Trainer needs
            warn_once(f"transformers.trainer cannot be imported ({error}): a Trainer will not know of patched models")
        return
    watch_trainers(advice_for, train=watching, prediction_step=announcing_predictions, compute_loss=announcing_labels)


def advice_for(trainer: Any) -> str | None:
    if not any(is_patched(module) for module in trainer.model.modules()):
        return None
    if not is_of_trl(trainer):
        return (
            "A patched model computes the loss of a call with labels, Trainer's own label smoothing included; give a "
            "loss of yours the hidden states and flce_ops.linear_cross_entropy"
        )
    from ..trl.patching import REPLACEMENTS

    if not REPLACEMENTS.in_place:
        warn_once(f"{type(trainer).__name__} never asks a patched model for its loss. {SERVED_OF_TRL}")
    return SERVED_OF_TRL


def announcing_predictions(original: Callable) -> Callable:
    def prediction_step(self, model: nn.Module, inputs: dict, prediction_loss_only: bool, *args, **kwargs):
        patched = [] if prediction_loss_only else [module for module in model.modules() if is_patched(module)]
        with announced(TAKEN_BY_TRAINER, True, *patched):
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)

    return prediction_step


def announcing_labels(original: Callable) -> Callable:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    def compute_loss(self, model: nn.Module, inputs: dict, return_outputs=False, num_items_in_batch=None, **kwargs):
        whole = self.accelerator.unwrap_model(model)
        base = inside_peft(whole)
        if not hasattr(base, EVAL_LOGITS):  # neither the model nor its class is patched
            return original(self, model, inputs, return_outputs, num_items_in_batch, **kwargs)
        check_loss_is_not_ligers(base)
        smoother, labels = self.label_smoother, inputs.get("labels")
        served = type(smoother) is LabelSmoother and self.compute_loss_func is None and isinstance(labels, Tensor)
        if not served or not is_patched(base) or gives_logits(base):
            return original(self, model, inputs, return_outputs, num_items_in_batch, **kwargs)
        named = base if base is whole else whole.base_model.model  # the same rule as Trainer's
        shifts = named._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        smoothed = SmoothedLoss(labels, smoother.epsilon, smoother.ignore_index, shifts, num_items_in_batch)

        def smoothed_loss(outputs: Any, *args: Any, **options: Any) -> Tensor:
            if not smoothed.computed:  # the model ran its own forward, because hooks see logits
                return smoother(outputs, *args, **options)
            return outputs["loss"] if isinstance(outputs, dict) else outputs[0]

        self.label_smoother = smoothed_loss
        try:
            with announced(SMOOTHED_BY_TRAINER, smoothed, base):
                return original(self, model, inputs, return_outputs, num_items_in_batch, **kwargs)
        finally:
            self.label_smoother = smoother

    return compute_loss


@contextlib.contextmanager
def announced(attribute: str, value: Any, *patched: nn.Module) -> Iterator[None]:
    for module in patched:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module in patched:
            if hasattr(module, attribute):  # a compiled model passes the attribute on to the model inside
                delattr(module, attribute)
