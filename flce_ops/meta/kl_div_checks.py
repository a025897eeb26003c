"""Checks of linear_kl_div's inner operators. Errors name the argument; no tensor data is read."""

import torch

from ..math.kl_div_arguments import TEACHER, KlDivOperands
from ..objectives.divergence import KINDS
from ..support.holes import refuse_hole
from ..support.symbolic import same_shape
from .checks import check_linear

# N tokens, D and E hidden sizes of student and teacher, V vocabulary


def check_teacher(op: str, operands: KlDivOperands) -> None:
    """Checks that there is either teacher_input with teacher_weight, or teacher_probs, with the student's tokens and
    classes.
    """
    input, classes = operands.input, operands.linear_weight.shape[0]
    teacher_input, teacher_weight = operands.teacher_input, operands.teacher_weight
    if operands.teacher_probs is not None:
        if any(tensor is not None for tensor in (teacher_input, teacher_weight, operands.teacher_bias)):
            raise ValueError(
                f"{op}: teacher_probs came together with teacher_input, teacher_weight or teacher_bias; pass the "
                "probabilities or the pair that makes them, not both"
            )
        expected = (*input.shape[:-1], classes)
        if not same_shape(operands.teacher_probs.shape, expected):
            raise ValueError(
                f"{op}: expected teacher_probs of shape {tuple(expected)}, a probability for each token of input and "
                f"row of linear_weight, got {tuple(operands.teacher_probs.shape)}"
            )
        if not operands.teacher_probs.dtype.is_floating_point:
            raise TypeError(f"{op}: expected teacher_probs in a floating dtype, got {operands.teacher_probs.dtype}")
        return
    if teacher_input is None or teacher_weight is None:
        given = [name for name in TEACHER[:3] if getattr(operands, name) is not None]
        raise ValueError(
            f"{op}: expected teacher_input and teacher_weight, or teacher_probs; got {' and '.join(given) or 'neither'}"
        )
    if teacher_input.dim() < 1 or not same_shape(teacher_input.shape[:-1], input.shape[:-1]):
        raise ValueError(
            f"{op}: expected teacher_input of shape {tuple(input.shape[:-1])} + (E,), with the tokens of input "
            f"{tuple(input.shape)}, got {tuple(teacher_input.shape)}"
        )
    names = ("teacher_input", "teacher_weight", "teacher_bias")
    check_linear(op, teacher_input, teacher_weight, operands.teacher_bias, names, classes_at_least=0)
    if teacher_weight.shape[0] != classes:
        raise ValueError(
            f"{op}: student and teacher must have one vocabulary, but linear_weight has {classes} rows and "
            f"teacher_weight {teacher_weight.shape[0]}; where one is padded, pass vocab_size, the classes of both"
        )


def check_kind(op: str, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"{op}: expected kind to be one of {', '.join(KINDS)}, got {kind!r}")


def check_no_teacher_gradient(op: str, **tensors) -> None:
    for name in TEACHER:
        tensor = tensors.get(name)
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            refuse_hole(op, "teacher", name=name)
