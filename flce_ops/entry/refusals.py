"""The combinations that are not implemented: a table from features of a call to the text of the error.

    source        positions (a head for each)
    objective     class probabilities, target_weight, metrics, argmax, teacher_probs
    sink          main_grad, sparse gradient, gradient_class_order, batch_invariant
    layout        DTensors, sharded vocabulary

What a single argument or one operator does not do is in support/holes.py. All other combinations are implemented. A new
feature that does not combine with everything adds its name and its rows here.
"""

from typing import Any

from ..distributed.one_rank import any_dtensor
from ..ops.call_facts import gradients_wanted, needs_gradient
from ..support.holes import not_implemented
from ..support.torch_private import functorch_is_active
from .schemas import CrossEntropy, CrossEntropyMetrics

NO_SPARSE = "the sparse gradient {} is not implemented; leave gradient_threshold out"


def wants_gradient(call: Any) -> bool:
    return any(gradients_wanted(call))


# present if the argument is given
GIVEN = ("target_weight", "teacher_probs", "main_grad", "gradient_class_order")


def features_of(call: Any) -> set[str]:
    """The features that follow from the arguments alone. "sharded vocabulary" depends on the layout: the caller adds
    it.
    """
    values = vars(call)
    found = {name for name in GIVEN if values.get(name) is not None}
    if any_dtensor(*values.values(), *values.get("tokens", ()), *values.get("tensors", ())):
        found.add("DTensors")
    if functorch_is_active():
        found.add("torch.func")
    if isinstance(call, CrossEntropy) and call.linear_weight.dim() > 2:
        found.add("positions")
    if isinstance(call, CrossEntropy) and call.target.is_floating_point():
        found.add("class probabilities")
    if isinstance(call, CrossEntropyMetrics) and any(call.statistics):
        found |= {"metrics", "argmax"} if call.statistics.argmax else {"metrics"}
    if "sparse" in values and call.sparse.gradient_threshold and wants_gradient(call):
        found.add("sparse gradient")
    if values.get("learnt_scale") is not None and needs_gradient(values["learnt_scale"]):
        found.add("learnt scale")
    if values.get("batch_invariant"):
        found |= {"batch_invariant", "a CPU"} if call.input.device.type == "cpu" else {"batch_invariant"}
    return found


REFUSED: dict[str, dict[tuple[str, ...], str]] = {
    "target_weight": {
        ("argmax",): "return_metrics of accuracy and argmax is not implemented beside target_weight, whose target "
        "names several classes; linear_log_probs(..., argmax=True) finds the largest logit",
    },
    "main_grad": {
        ("torch.func",): "main_grad is not implemented under torch.func, whose functions are pure",
        ("DTensors",): "main_grad beside DTensors is not implemented; pass this rank's tensors, or leave main_grad out",
        ("positions",): "main_grad is not implemented for a K-dimensional loss; add the gradient to it yourself",
        ("class probabilities",): "main_grad is not implemented for a target of class probabilities; add the gradient "
        "to it yourself",
    },
    "sparse gradient": {
        ("positions",): NO_SPARSE.format("of a K-dimensional loss"),
        ("class probabilities",): NO_SPARSE.format("of class probabilities"),
        ("main_grad",): NO_SPARSE.format("with main_grad"),
        ("gradient_class_order", "DTensors"): NO_SPARSE.format("of DTensors with gradient_class_order"),
        ("sharded vocabulary",): NO_SPARSE.format("over a sharded vocabulary"),
    },
    "learnt scale": {
        ("DTensors",): "the gradient of a logit_scale or temperature beside DTensors is not implemented; pass it "
        "detached, or multiply the hidden states by it before the head",
        ("sparse gradient",): NO_SPARSE.format("beside the gradient of a logit_scale or temperature"),
    },
    "batch_invariant": {
        ("sharded vocabulary",): "batch_invariant over a sharded vocabulary is not implemented; leave it out",
        ("sparse gradient",): "batch_invariant of a sparse gradient is not implemented; leave one of them out",
        ("a CPU",): "batch_invariant on a CPU is not implemented; leave it out",
    },
    "positions": {
        ("DTensors",): "a K-dimensional loss (linear_weight of shape {linear_weight}) with DTensors is not "
        "implemented; pass plain tensors, or one head of shape (V, D) at a time",
        ("target_weight",): "target_weight is not implemented for a K-dimensional loss (linear_weight of shape "
        "{linear_weight}); pass one head of shape (V, D) at a time",
    },
    "class probabilities": {
        ("metrics",): "return_metrics is not implemented for a target of class probabilities, which names no class; "
        "linear_log_probs(..., argmax=True) finds the largest logit",
        ("DTensors",): "a target of class probabilities with DTensors is not implemented; pass plain tensors "
        "throughout, or the model that makes them to linear_kl_div as DTensors",
    },
    "teacher_probs": {
        ("DTensors",): "teacher_probs with DTensors is not implemented; pass the teacher's hidden states and weight "
        "(teacher_input, teacher_weight) as DTensors, or plain tensors throughout",
    },
}


def refuse(op: str, call: Any, features: set[str]) -> None:
    for feature, rows in REFUSED.items():
        if feature in features:
            for others, text in rows.items():
                if features.issuperset(others):
                    not_implemented(op, text.format(linear_weight=tuple(call.linear_weight.shape)))
