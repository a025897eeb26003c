"""The entry operators: from the user's arguments to the inner operators, for plain tensors and DTensors. This file
registers them.

arguments.py    checks the arguments, naming them in errors
rewrites.py     arguments that become other arguments: shift, K-dimensional losses, an order of classes, a tensor scale
loss.py         how a loss is computed, for every objective, for plain tensors and DTensors
bodies.py       cross-entropy of a head and of given logits, log-probabilities, functions of one token, policies
kl_div.py       divergences from a teacher; targets that are class probabilities
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import ops as inner_operators  # noqa: F401, registers them
from ..meta.arguments import (
    CrossEntropy,
    CrossEntropyMetrics,
    KlDiv,
    LogitsCrossEntropy,
    LogitsCrossEntropyInPlace,
    LogProbs,
    PolicyLoss,
    TokenLoss,
)
from ..meta.call import Arguments
from ..ops import cast_operands, has_autocast, library
from ..support.refusals import refuse_hole, running
from . import kl_div
from .bodies import (
    cross_entropy,
    cross_entropy_metrics,
    log_probs,
    logits_cross_entropy,
    logits_metrics,
    policy_loss,
    token_loss,
)

METRICS = "(Tensor loss, Tensor token_accuracy, Tensor argmax)"  # of given logits
ENTRIES: dict[str, tuple[type[Arguments], str, Callable]] = {
    "linear_cross_entropy": (CrossEntropy, "Tensor", cross_entropy),
    "linear_cross_entropy_metrics": (
        CrossEntropyMetrics,
        "(Tensor loss, Tensor token_accuracy, Tensor is_top1, Tensor argmax, Tensor lse, Tensor entropy, "
        "Tensor log_sum_sq_probs, Tensor mean_logit)",
        cross_entropy_metrics,
    ),
    "linear_log_probs": (
        LogProbs,
        "(Tensor log_probs, Tensor lse, Tensor entropy, Tensor argmax, Tensor log_sum_sq_probs, Tensor mean_logit, "
        "Tensor tail_log_prob)",
        log_probs,
    ),
    "linear_kl_div": (KlDiv, "Tensor", kl_div.composite),
    "linear_token_loss": (TokenLoss, "(Tensor loss, Tensor log_probs)", token_loss),
    "linear_policy_loss": (PolicyLoss, "(Tensor loss, Tensor log_probs)", policy_loss),
    "cross_entropy": (LogitsCrossEntropy, "Tensor", partial(logits_cross_entropy, handed_over=False)),
    "cross_entropy_metrics": (LogitsCrossEntropy, METRICS, partial(logits_metrics, handed_over=False)),
    "cross_entropy_": (LogitsCrossEntropyInPlace, "Tensor", partial(logits_cross_entropy, handed_over=True)),
    "cross_entropy_metrics_": (LogitsCrossEntropyInPlace, METRICS, partial(logits_metrics, handed_over=True)),
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
