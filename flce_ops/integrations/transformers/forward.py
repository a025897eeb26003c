"""The model's own forward, with the loss in place of the logits.

The forward runs on a stand-in for the model. The stand-in's attributes are the model's, except:

    logits = self.lm_head(hidden)                keeps `hidden`, returns (B, T, 0): nothing to scale or cap
    logits = logits + self.final_logits_bias     a bias without classes
    loss = self.loss_function(logits, labels)    calls the model's lm_head with `hidden` and the targets

A forward that computes its own cross-entropy calls self.flce_cross_entropy instead (cross_entropy_call.py). Arguments,
mixture-of-experts losses and outputs stay the model's. If logits are wanted beside the loss, `lm_head` returns them and
the model's code puts them into its output; the loss is the same.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils import ModelOutput

from ...entry.shifted_target import next_labels
from .head import makers_of_logits, prepare_head
from .instance_forward import name_of
from .logit_steps import Head
from .no_logits import LOGITS_NOT_COMPUTED
from .output_hooks import wants_logits
from .output_metrics import Metrics, with_metrics
from .read_head import read

# B batch, T tokens, D hidden, V vocabulary

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

    def of(self, stand_in: "WithoutLogits") -> Tensor:  # ()
        target = next_labels(self.labels, self.ignore_index) if self.shift_labels else self.labels
        loss = stand_in.flce_loss(target, None, self.ignore_index, self.count, self.label_smoothing)
        self.computed = True
        return loss


class KeepHidden:
    """Stands in for the head of `stand_in` while the forward computes logits."""

    def __init__(self, stand_in: "WithoutLogits", head: nn.Module) -> None:
        self.stand_in, self.head = stand_in, head

    def __getattr__(self, name: str):  # the forward may read the weight's dtype
        return getattr(self.head, name)

    def __call__(self, hidden: Tensor) -> Tensor:  # (B, T, D) -> (B, T, 0), or the logits (B, T, V)
        self.stand_in.flce_hidden = hidden
        if self.stand_in.flce_with_logits:
            return self.head(hidden)
        return hidden.new_empty(*hidden.shape[:-1], 0)


class WithoutLogits:
    """Stands in for `model` during one forward."""

    def __init__(self, model: nn.Module, head: Head, with_logits: bool) -> None:
        self.flce_model = model
        self.flce_head = head
        self.flce_with_logits = with_logits
        self.flce_hidden: Tensor | None = None
        # no metrics then: Trainer takes everything beside the loss for predictions
        self.flce_metrics = Metrics(() if getattr(model, TAKEN_BY_TRAINER, False) else getattr(model, METRICS, ()))
        setattr(self, head.name, KeepHidden(self, getattr(model, head.name)))
        if head.bias is not None and not with_logits:
            setattr(self, head.bias, getattr(model, head.bias)[..., :0])

    def __getattr__(self, name: str):
        return getattr(self.flce_model, name)

    def loss_function(
        self,
        logits: Tensor,  # (B, T, 0) or (B, T, V)
        labels: Tensor,  # (B, T)
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,  # (B, T)
        **kwargs,
    ) -> Tensor:  # ()
        """Same as Transformers' ForCausalLMLoss or ForMaskedLMLoss on the logits."""
        check_loss(self.flce_model, self.flce_head)
        target = labels
        if self.flce_model.loss_function is ForCausalLMLoss:
            target = shift_labels
            if target is None:
                target = next_labels(labels, ignore_index)
        return self.flce_loss(target, vocab_size, ignore_index, num_items_in_batch)

    def flce_cross_entropy(self, logits: Tensor, target: Tensor, vocab_size: int | None) -> Tensor:  # ()
        """Same as nn.CrossEntropyLoss() on the logits, (B T, V), and target, (B T,)."""
        check_loss(self.flce_model, self.flce_head)
        ignore_index = self.flce_head.cross_entropy.ignore_index_of(self.flce_model)
        return self.flce_loss(target, vocab_size, ignore_index, None)

    def flce_loss(
        self,
        target: Tensor,
        vocab_size: int | None,
        ignore_index: int,
        count: Tensor | int | None,
        label_smoothing: float | None = None,  # None: the option given to patch
    ) -> Tensor:  # ()
        model, hidden = self.flce_model, self.flce_hidden
        if label_smoothing is None:
            label_smoothing = getattr(model, LABEL_SMOOTHING, 0.0)
        if target.numel() != hidden.shape[:-1].numel():
            raise ValueError(
                f"{type(model).__name__}: expected a label for each of the {hidden.shape[:-1].numel()} positions that "
                f"logits_to_keep leaves, got {target.numel()}"
            )
        target = target.reshape(hidden.shape[:-1]).to(hidden.device)
        head = getattr(model, self.flce_head.name)
        prepare_head(head, type(model).__name__)
        options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": self.flce_head.softcap_of(model),
            "logit_scale": self.flce_head.logit_scale(model),
        }
        if self.flce_metrics.names:
            options["metrics"] = self.flce_metrics
        gradient_threshold = getattr(model, GRADIENT_THRESHOLD, 0.0)
        if gradient_threshold:
            options["gradient_threshold"] = gradient_threshold
        if self.flce_head.bias is not None:
            options["logits_bias"] = getattr(model, self.flce_head.bias)
        if isinstance(count, Tensor):
            count = count.to(hidden.device)
        # Divides after the call, since FSDP's mixed precision rounds floating arguments of the head's forward, and the
        # operator takes 0-d counts only.
        divide_afterwards = isinstance(count, Tensor) and (count.is_floating_point() or count.dim() > 0)
        if divide_afterwards:
            options["reduction"] = "sum"
        else:
            options["normalizer"] = count
        # by name, because hooks of tensor parallelism drop all positional arguments but the first
        loss = head(hidden, target=target, **options)
        if loss.dim() != 0:
            raise RuntimeError(
                f"{type(model).__name__}: expected {self.flce_head.name} to return a loss of shape (), got "
                f"{tuple(loss.shape)}: something around its forward drops the targets; leave the model unpatched"
            )
        return loss / count if divide_afterwards else loss


def check_loss(model: nn.Module, head: Head) -> None:
    head.check(model)
    if head.cross_entropy is None and model.loss_function not in (ForCausalLMLoss, ForMaskedLMLoss):
        raise NotImplementedError(
            f"{type(model).__name__}: expected model.loss_function to be Transformers' ForCausalLMLoss or "
            f"ForMaskedLMLoss, got {name_of(cast(Callable, model.loss_function))}; another loss needs the logits, so "
            "leave the model unpatched"
        )


def gives_logits(model: nn.Module) -> bool:
    """Whether `model` also returns logits beside the loss, which it computes without them."""
    if getattr(model, TAKEN_BY_TRAINER, False):
        return True
    return not model.training and getattr(model, EVAL_LOGITS, False)


def is_patched(model: nn.Module) -> bool:
    return getattr(model, ACTIVE, False) or hasattr(type(model).forward, "flce_original")


def forward_without_logits(original: Callable, head: Head, *, of_instance: bool) -> Callable:
    """The forward that replaces `original`, of one instance or of a class."""
    _, without_cross_entropy = read(original)
    parameters = list(inspect.signature(original).parameters)
    labels_at = parameters.index("labels") - 1  # without self

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
        smoothed = getattr(self, SMOOTHED_BY_TRAINER, None) if labels is None else None
        if (labels is None and smoothed is None) or (of_instance and not getattr(self, ACTIVE, False)):
            return original(self, *args, **kwargs)
        name = type(self).__name__
        if wants_logits(makers_of_logits(getattr(self, head.name), name), head.modules_of_loss(self), name):
            if labels is not None and getattr(self, LABEL_SMOOTHING, 0.0):
                raise NotImplementedError(
                    f"{name}: label_smoothing of patch: not implemented beside hooks that see logits, with which the "
                    "model computes its own loss; remove the hooks, or patch without label_smoothing"
                )
            return original(self, *args, **kwargs)
        with_logits = gives_logits(self)
        stand_in = WithoutLogits(self, head, with_logits)
        if with_logits and not stand_in.flce_metrics.names:
            return without_cross_entropy(stand_in, *args, **kwargs)
        return_dict = kwargs.get("return_dict")
        if return_dict is None:
            return_dict = self.config.return_dict
        if not return_dict:
            kwargs["return_dict"] = True  # the logits can only be told from the other entries by name
        output = without_cross_entropy(stand_in, *args, **kwargs)
        if smoothed is not None:
            output = type(output)(loss=smoothed.of(stand_in), **output)
        output = with_metrics(output if with_logits else without_logits(output), stand_in.flce_metrics.found)
        return output if return_dict else output.to_tuple()

    forward.flce_original = original  # type: ignore[attr-defined]
    return forward


def without_logits(output: ModelOutput) -> ModelOutput:
    if torch.compiler.is_exporting():  # an exported program may return only tensors
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return type(output)(**{name: LOGITS_NOT_COMPUTED if name == "logits" else value for name, value in output.items()})
