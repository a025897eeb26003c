"""The entry operators: from the user's arguments to the inner operators, for plain tensors and DTensors.

schemas.py             their arguments
arguments.py           checks the arguments, naming them in errors
hints.py               the likely mistake behind a wrong name, type or shape
refusals.py            the combinations that are not implemented
loss.py                how a loss is computed, for every objective, for plain tensors and DTensors

cross_entropy.py       a head
logits.py              given logits
log_probs.py           log-probabilities and other results of a row
token_loss.py          functions of one token, and policy losses, which are such functions
kl_div.py              divergences from a teacher; targets that are class probabilities
positions.py           K-dimensional losses: a head for each position

metrics.py             return_metrics by name
class_order.py         the user's order of classes, for a sparse gradient
learnt_scale.py        a scale that is a tensor, and may get a gradient
shifted_target.py      unshifted labels, whose targets are the next ones
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import ops as inner_operators  # noqa: F401, registers them
from ..meta.call import Arguments
from ..ops.autocast import cast_operands, has_autocast
from ..ops.registration import library
from ..support.holes import refuse_hole, running
from . import cross_entropy, kl_div, log_probs, logits, schemas, token_loss

METRICS = "(Tensor loss, Tensor token_accuracy, Tensor argmax)"  # of given logits
ENTRIES: dict[str, tuple[type[Arguments], str, Callable]] = {
    "linear_cross_entropy": (schemas.CrossEntropy, "Tensor", cross_entropy.composite),
    "linear_cross_entropy_metrics": (
        schemas.CrossEntropyMetrics,
        "(Tensor loss, Tensor token_accuracy, Tensor is_top1, Tensor argmax, Tensor lse, Tensor entropy, "
        "Tensor log_sum_sq_probs, Tensor mean_logit)",
        cross_entropy.composite_metrics,
    ),
    "linear_log_probs": (
        schemas.LogProbs,
        "(Tensor log_probs, Tensor lse, Tensor entropy, Tensor argmax, Tensor log_sum_sq_probs, Tensor mean_logit, "
        "Tensor tail_log_prob)",
        log_probs.composite,
    ),
    "linear_kl_div": (schemas.KlDiv, "Tensor", kl_div.composite),
    "linear_token_loss": (schemas.TokenLoss, "(Tensor loss, Tensor log_probs)", token_loss.composite),
    "linear_policy_loss": (schemas.PolicyLoss, "(Tensor loss, Tensor log_probs)", token_loss.composite_policy),
    "cross_entropy": (schemas.LogitsCrossEntropy, "Tensor", partial(logits.composite, handed_over=False)),
    "cross_entropy_metrics": (schemas.LogitsCrossEntropy, METRICS, partial(logits.metrics, handed_over=False)),
    "cross_entropy_": (schemas.LogitsCrossEntropyInPlace, "Tensor", partial(logits.composite, handed_over=True)),
    "cross_entropy_metrics_": (schemas.LogitsCrossEntropyInPlace, METRICS, partial(logits.metrics, handed_over=True)),
}


def body_of(name: str) -> Callable:
    """The body of an entry operator. ONNX's exporter runs bodies to decompose them, but knows no inner operator, so it
    is refused.
    """
    arguments, results, body = ENTRIES[name]
    alone, function = results == "Tensor", name.rstrip("_").removesuffix("_metrics")
    first = arguments.arguments[0].name

    def run(*args: Any, **kwargs: Any) -> Any:
        # not imported: an exporter has imported it
        if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():
            refuse_hole(name, "onnx")
        call = arguments.bind(*args, **kwargs)
        device_type = getattr(call, first).device.type
        autocast = has_autocast(device_type) and torch.is_autocast_enabled(device_type)
        outer, running.function = running.function, running.function or function
        try:
            if autocast:
                cast_operands(call, device_type)
                torch.set_autocast_enabled(device_type, False)
            found = body(call)
        finally:
            running.function = outer
            if autocast:
                torch.set_autocast_enabled(device_type, True)
        return found[0] if alone and isinstance(found, tuple) else found

    return run


BODIES = {name: body_of(name) for name in ENTRIES}
for _name, (_arguments, _results, _) in ENTRIES.items():
    library.define(f"{_name}{_arguments.schema()} -> {_results}", tags=torch.Tag.pt2_compliant_tag)
    # The bodies are registered on torch.func's key, too, because they must run before torch.func removes a transform
    # (grad, vmap) from the call.
    for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(_name, BODIES[_name], _key)
