"""The entry operators: from the user's arguments to the inner operators, for plain tensors and DTensors.

schemas.py             their arguments
argument_types.py      refusals of wrong types by name
arguments.py           refusals by name of what an argument must be
refusals.py            the combinations that nobody wrote
loss.py                the story of a loss, for plain tensors and DTensors, and for every objective

cross_entropy.py       of a head
low_rank.py            of a head with a low-rank pair (LoRA)
logits.py              of given logits
row_loss.py            of objectives with operators of their own: policy losses
log_probs.py           log-probabilities, and what else is asked of a row
kl_div.py              divergences from a teacher
class_probabilities.py targets that are class probabilities
positions.py           K-dimensional losses, a head for each position

metrics.py             return_metrics by name
class_order.py         classes in an order of the user's, for a sparse gradient
learnt_scale.py        a scale that gets a gradient
token_temperature.py   a temperature of each token
padded_vocabulary.py   the classes that vocabularies have but for their padding
shifted_target.py      labels whose targets are the next ones
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import ops as ops  # registers the inner operators
from ..meta.call import Arguments
from ..objectives.row import RowObjective
from ..ops.autocast import autocast_kernel
from ..ops.library import library
from ..support.holes import refuse_hole
from . import cross_entropy, kl_div, log_probs, logits, low_rank, row_loss, schemas

ENTRIES: dict[str, tuple[type[Arguments], str, Callable]] = {
    "linear_cross_entropy": (schemas.CrossEntropy, "Tensor", cross_entropy.composite),
    "linear_cross_entropy_metrics": (
        schemas.CrossEntropyMetrics,
        "(Tensor loss, Tensor token_accuracy, Tensor is_top1, Tensor argmax, Tensor lse, Tensor entropy, "
        "Tensor log_sum_sq_probs, Tensor mean_logit)",
        cross_entropy.composite_metrics,
    ),
    "linear_cross_entropy_low_rank": (schemas.LowRankCrossEntropy, "Tensor", low_rank.composite),
    "linear_log_probs": (
        schemas.LogProbs,
        "(Tensor log_probs, Tensor lse, Tensor entropy, Tensor argmax, Tensor log_sum_sq_probs, Tensor mean_logit, "
        "Tensor tail_log_prob)",
        log_probs.composite,
    ),
    "linear_kl_div": (schemas.KlDiv, "Tensor", kl_div.composite),
    **{
        name: (schemas.schema_of(objective), "(Tensor loss, Tensor log_probs)", row_loss.composite)
        for name, objective in RowObjective.named.items()
    },
    "cross_entropy": (schemas.LogitsCrossEntropy, "Tensor", partial(logits.composite, handed_over=False)),
    "cross_entropy_metrics": (
        schemas.LogitsCrossEntropy,
        "(Tensor loss, Tensor token_accuracy, Tensor argmax)",
        partial(logits.metrics, handed_over=False),
    ),
    "cross_entropy_": (schemas.LogitsCrossEntropyInPlace, "Tensor", partial(logits.composite, handed_over=True)),
    "cross_entropy_metrics_": (
        schemas.LogitsCrossEntropyInPlace,
        "(Tensor loss, Tensor token_accuracy, Tensor argmax)",
        partial(logits.metrics, handed_over=True),
    ),
}
CAST = (
    schemas.CrossEntropy,
    schemas.CrossEntropyMetrics,
    schemas.LowRankCrossEntropy,
    schemas.LogProbs,
    schemas.RowLoss,
)


def body_of(name: str) -> Callable:
    """On what the operator takes. ONNX's exporter runs bodies to decompose them, and knows no inner operator."""
    arguments, results, body = ENTRIES[name]
    alone = results == "Tensor"
    # whose inner operators export_decompositions() leaves out
    whole = name == "linear_kl_div" or name.startswith("cross_entropy")
    instead = (
        "call torch's own formula there"
        if whole
        else (
            "export a program of ATen: torch.onnx.export(torch.export.export(model, args).run_decompositions("
            "flce_ops.export_decompositions()))"
        )
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.onnx.is_in_onnx_export():
            refuse_hole(name, "onnx", instead=instead)
        found = body(arguments.bind(*args, **kwargs))
        return found[0] if alone and isinstance(found, tuple) else found

    return run


BODIES = {name: body_of(name) for name in ENTRIES}
for _name, (_arguments, _results, _) in ENTRIES.items():
    library.define(f"{_name}{_arguments.schema()} -> {_results}", tags=torch.Tag.pt2_compliant_tag)
    # On torch.func's key too: the bodies must run before any transform has been peeled off.
    for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):
        library.impl(_name, BODIES[_name], _key)
    # Where a program is decomposed the bodies run behind autocast's keys and would not see autocast.
    for _device_type in ("cpu", "cuda") if issubclass(_arguments, CAST) else ():
        _op = getattr(torch.ops.flce, _name).default
        library.impl(_name, autocast_kernel(_op, _arguments, _device_type), f"Autocast{_device_type.upper()}")
