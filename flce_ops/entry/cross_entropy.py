"""Bodies of the entry operators flce::linear_cross_entropy and flce::linear_cross_entropy_metrics.

The entries are CompositeImplicitAutograd, as ATen's scaled_dot_product_attention: they see requires_grad, autocast and
tensor subclasses, and everything they do beyond the inner operators is ordinary differentiable ATen over N numbers.
"""

from torch import Tensor

from flce_ops.entry import plain
from flce_ops.entry.class_probabilities import loss_of_probabilities
from flce_ops.entry.positions import losses_of_positions
from flce_ops.entry.schemas import CrossEntropy
from flce_ops.entry.sparse_gradient import refuse_sparse_gradient
from flce_ops.math.reduction import accuracy_of, right_and_valid
from flce_ops.meta.arguments import takes
from flce_ops.support.dtensor import any_dtensor

OP = "linear_cross_entropy"


@takes(CrossEntropy)
def composite(call: CrossEntropy) -> Tensor:
    """Body of torch.ops.flce.linear_cross_entropy."""
    return loss_and_argmax(call, argmax=False)[0]


@takes(CrossEntropy)
def composite_metrics(call: CrossEntropy) -> tuple[Tensor, Tensor, Tensor]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics: (loss, token_accuracy, argmax)."""
    indices_of_matrix = call.linear_weight.dim() <= 2 and not call.target.is_floating_point()
    if indices_of_matrix and any_dtensor(call.input, call.linear_weight, call.target):
        from flce_ops.entry.sharded import dtensor_composite_metrics

        refuse_sparse_gradient(call, "of DTensors")
        return dtensor_composite_metrics(call)
    loss, argmax = loss_and_argmax(call, argmax=True)
    return loss, accuracy_of(right_and_valid(argmax, call.target, call.ignore_index)), argmax


def loss_and_argmax(call: CrossEntropy, argmax: bool) -> tuple[Tensor, Tensor | None]:
    if call.linear_weight.dim() > 2:
        refuse_sparse_gradient(call, "of a K-dimensional loss")
        return losses_of_positions(call, argmax, of_matrix)
    return of_matrix(call, argmax)


def of_matrix(call: CrossEntropy, argmax: bool) -> tuple[Tensor, Tensor | None]:
    """Of a linear_weight (V, D)."""
    if call.target.is_floating_point():
        refuse_sparse_gradient(call, "of class probabilities")
        return loss_of_probabilities(call, argmax), None
    if any_dtensor(*call.values()):
        refuse_sparse_gradient(call, "of DTensors")
        from flce_ops.entry.sharded import dtensor_composite  # torch.distributed.tensor: only for its users

        return dtensor_composite(call, argmax)
    return plain.loss_and_argmax(call, argmax)
