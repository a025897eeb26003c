"""Bodies of the entry operators flce::linear_cross_entropy and flce::linear_cross_entropy_metrics.

The entries are CompositeImplicitAutograd, as ATen's scaled_dot_product_attention: they see requires_grad, autocast and
tensor subclasses, and everything they do beyond the inner operators is ordinary differentiable ATen over N numbers.
"""

from torch import Tensor

from flce_ops.entry import plain
from flce_ops.math.reduction import accuracy_of, right_and_valid
from flce_ops.support.dtensor import any_dtensor

OP = "linear_cross_entropy"


def composite(*args, **options) -> Tensor:
    """Body of torch.ops.flce.linear_cross_entropy."""
    return loss_and_argmax(*args, **options, argmax=False)[0]


def composite_metrics(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """Body of torch.ops.flce.linear_cross_entropy_metrics: (loss, token_accuracy, argmax)."""
    if any_dtensor(input, linear_weight, target):
        from flce_ops.entry.sharded import dtensor_composite_metrics

        return dtensor_composite_metrics(input, linear_weight, target, linear_bias, **options)
    loss, argmax = loss_and_argmax(input, linear_weight, target, linear_bias, **options, argmax=True)
    right = right_and_valid(argmax, target, options.get("ignore_index", -100))
    return loss, accuracy_of(right), argmax


def loss_and_argmax(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    normalizer: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor | None]:
    body = plain.loss_and_argmax
    if any_dtensor(input, linear_weight, target, linear_bias, weight, token_weight, normalizer):
        from flce_ops.entry.sharded import dtensor_composite  # torch.distributed.tensor: only for its users

        body = dtensor_composite
    tensors = {"weight": weight, "token_weight": token_weight, "normalizer": normalizer}
    return body(input, linear_weight, target, linear_bias, **tensors, **options)
