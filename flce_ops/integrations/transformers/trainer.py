"""Trainer takes a model's logits as predictions: it gets them where it does, and evaluates by the loss alone elsewhere.

    evaluate, no compute_metrics          prediction_step(..., prediction_loss_only=True)     no logits
    evaluate with compute_metrics         prediction_step(..., prediction_loss_only=False)    logits
    predict                               prediction_step(..., prediction_loss_only=False)    logits

Only that argument tells them apart; a model's forward gets the same from all three. So `prediction_step` says it to the
patched models it calls. Models that are not patched are not touched.
"""

import functools
from collections.abc import Callable

from torch import nn

from flce_ops.integrations.transformers.forward import TAKEN_BY_TRAINER, is_patched


def announce_predictions() -> None:
    try:
        from transformers.trainer import Trainer
    except ImportError:  # it needs accelerate, which an installation without Trainer has no use for
        return
    if not hasattr(Trainer.prediction_step, "flce_original"):
        Trainer.prediction_step = announcing(Trainer.prediction_step)  # type: ignore[method-assign]


def announcing(original: Callable) -> Callable:
    @functools.wraps(original)
    def prediction_step(self, model: nn.Module, inputs: dict, prediction_loss_only: bool, *args, **kwargs):
        patched = [] if prediction_loss_only else [module for module in model.modules() if is_patched(module)]
        for module in patched:
            setattr(module, TAKEN_BY_TRAINER, True)
        try:
            return original(self, model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            for module in patched:
                setattr(module, TAKEN_BY_TRAINER, False)

    prediction_step.flce_original = original  # type: ignore[attr-defined]
    return prediction_step
