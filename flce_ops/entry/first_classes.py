"""Vocabularies that are padded: the classes before vocab_size, as views of the operands' rows.

    linear_weight[:v]   linear_bias[:v]   teacher_weight[:v]   teacher_bias[:v]   teacher_probs[..., :v]

Those from v on have no probability on either side. Nothing is copied in forward; in backward autograd puts the gradient
of v rows into one of all, the others zeros.
"""

from torch import Tensor

from flce_ops.meta.checks import check_dense, check_per_class
from flce_ops.support.dtensor import any_dtensor

# D and E hidden sizes of student and teacher, V classes of one of them, padding included


def first_classes(
    op: str,
    vocab_size: int,
    linear_weight: Tensor,  # (V, D)
    linear_bias: Tensor | None,  # (V,)
    teacher_weight: Tensor | None,  # (V, E), another V
    teacher_bias: Tensor | None,  # (V,)
    teacher_probs: Tensor | None,  # (..., V)
) -> tuple[Tensor | None, ...]:
    """The same with vocab_size for V."""
    if vocab_size < 1:
        raise ValueError(f"{op}: expected vocab_size to be positive or None, got {vocab_size}")
    if any_dtensor(linear_weight, linear_bias, teacher_weight, teacher_bias, teacher_probs):
        raise NotImplementedError(
            f"{op}: vocab_size={vocab_size} with DTensors is not implemented, as rows would move between ranks; give "
            "the padding a bias of -inf in both models, or distribute weight[:vocab_size]"
        )

    def first(name: str, tensor: Tensor | None, dim: int = 0, bias_of: Tensor | None = None) -> Tensor | None:
        if tensor is None:
            return None
        check_dense(op, **{name: tensor})
        if bias_of is not None and bias_of.dim() == 2:
            check_per_class(op, name, tensor, bias_of.shape[0], name.replace("bias", "weight"))
        if tensor.dim() == 0 or tensor.shape[dim] == vocab_size:
            return tensor
        if tensor.shape[dim] < vocab_size:
            raise ValueError(
                f"{op}: expected vocab_size to be at most the {tensor.shape[dim]} classes of {name}, got {vocab_size}"
            )
        return tensor.narrow(dim, 0, vocab_size)

    return (
        first("linear_weight", linear_weight),
        first("linear_bias", linear_bias, bias_of=linear_weight),
        first("teacher_weight", teacher_weight),
        first("teacher_bias", teacher_bias, bias_of=teacher_weight),
        first("teacher_probs", teacher_probs, dim=-1),
    )
