"""Padded vocabularies: replaces each operand by a view of its classes below vocab_size = v.

    linear_weight[:v]   linear_bias[:v]   teacher_weight[:v]   teacher_bias[:v]   teacher_probs[..., :v]

Classes from v on have no probability on either side. Forward copies nothing. In backward, autograd puts the gradient of
v rows into a tensor of all rows, with zeros for the others.
"""

from typing import Any

from torch import Tensor

from ..meta.checks import check_dense, check_per_class
from ..support.dtensor import any_dtensor
from ..support.holes import refuse_hole

# D and E hidden sizes of student and teacher, V classes of one of them, padding included


# for each argument: the dimension that holds the classes, and for a bias its weight
CLASSES = {
    "linear_weight": (0, ""),
    "linear_bias": (0, "linear_weight"),
    "teacher_weight": (0, ""),
    "teacher_bias": (0, "teacher_weight"),
    "teacher_probs": (-1, ""),
}


def first_classes(op: str, vocab_size: int, given: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of `given` that have classes, cut to vocab_size; they may differ in V."""
    tensors: dict[str, Tensor] = {name: given[name] for name in CLASSES if given.get(name) is not None}
    if vocab_size < 1:
        raise ValueError(f"{op}: expected vocab_size to be positive or None, got {vocab_size}")
    if any_dtensor(*tensors.values()):
        refuse_hole(op, "vocab_size of DTensors", vocab_size=vocab_size)
    found = {}
    for name, tensor in tensors.items():
        dim, beside = CLASSES[name]
        check_dense(op, **{name: tensor})
        if beside in tensors and tensors[beside].dim() == 2:
            check_per_class(op, name, tensor, tensors[beside].shape[0], beside)
        if tensor.dim() and tensor.shape[dim] < vocab_size:
            raise ValueError(
                f"{op}: expected vocab_size to be at most the {tensor.shape[dim]} classes of {name}, got {vocab_size}"
            )
        whole = tensor.dim() == 0 or tensor.shape[dim] == vocab_size
        found[name] = tensor if whole else tensor.narrow(dim, 0, vocab_size)
    return found
